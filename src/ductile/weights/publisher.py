"""Offering weights: a version's tensors in one sealed memory segment (`ductile.fabric.segment`), until withdrawn."""

from collections.abc import Iterable

import torch

from ductile.fabric.segment import Segment
from ductile.records import Manifest, TensorEntry


class Publisher:
    """Holds the published versions of one process."""

    def __init__(self) -> None:
        self._offers: dict[int, tuple[Manifest, Segment]] = {}

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Copy the tensors (full, any device, any dtype) into a new segment and describe it.

        The iterable is consumed one tensor at a time, so it may gather each only when asked for it.
        """
        if version in self._offers:
            raise ValueError(f"version {version} is published already; withdraw it first")
        segment = Segment(f"ductile-weights-{version}")
        try:
            entries = tuple(_append(segment, name, tensor) for name, tensor in tensors)
            segment.seal()
        except BaseException:
            segment.close()
            raise
        manifest = Manifest(version, "shared_memory", segment.location, segment.num_bytes, segment.fingerprint, entries)
        self._offers[version] = manifest, segment
        return manifest

    def lease(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """`publish` for several readers, one after the other: a version that is published already is offered again."""
        return self._offers[version][0] if version in self._offers else self.publish(version, tensors)

    def withdraw(self, version: int) -> None:
        """Free this version and all older ones. Receivers that map them keep what they have."""
        for older in [offered for offered in self._offers if offered <= version]:
            self._offers.pop(older)[1].close()

    def close(self) -> None:
        """Withdraw everything."""
        self.withdraw(max(self._offers, default=0))


def _append(segment: Segment, name: str, tensor: torch.Tensor) -> TensorEntry:
    offset_bytes = segment.append(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(name, dtype, tuple(tensor.shape), offset_bytes, tensor.nbytes)
