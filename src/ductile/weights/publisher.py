"""Offering weights: a version's tensors in one sealed memory segment (`ductile.fabric.segment`), until withdrawn."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ductile.fabric.segment import Segment
from ductile.records import Manifest, TensorEntry


@dataclass(frozen=True, slots=True)
class _Offer:
    manifest: Manifest
    segment: Segment


class Publisher:
    """Holds the published versions of one process."""

    def __init__(self) -> None:
        self._offers: list[_Offer] = []

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(offer.manifest.version for offer in self._offers)

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Copy the tensors (full, any device, any dtype) into a new segment and describe it.

        The iterable is consumed one tensor at a time, so it may gather each only when asked for it.
        """
        if version in self.versions:
            raise ValueError(f"version {version} is published already; withdraw it first")
        segment = Segment(f"ductile-weights-{version}")
        try:
            entries = tuple(_append(segment, name, tensor) for name, tensor in tensors)
            segment.seal()
        except BaseException:
            segment.close()
            raise
        manifest = Manifest(version, "shared_memory", segment.location, segment.num_bytes, segment.fingerprint, entries)
        self._offers.append(_Offer(manifest, segment))
        return manifest

    def lease(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """`publish` for several readers, one after the other: a version that is published already is offered again."""
        for offer in self._offers:
            if offer.manifest.version == version:
                return offer.manifest
        return self.publish(version, tensors)

    def withdraw(self, version: int) -> None:
        """Free this version and all older ones. Receivers that map them keep what they have."""
        for offer in [offer for offer in self._offers if offer.manifest.version <= version]:
            self._offers.remove(offer)
            offer.segment.close()

    def close(self) -> None:
        """Withdraw everything."""
        while self._offers:
            self._offers.pop().segment.close()


def _append(segment: Segment, name: str, tensor: torch.Tensor) -> TensorEntry:
    offset_bytes = segment.append(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(name, dtype, tuple(tensor.shape), offset_bytes, tensor.numel() * tensor.element_size())
