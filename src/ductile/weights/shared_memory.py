"""Weights by shared memory, between processes of one host: a version's tensors in one sealed memory segment
(`ductile.fabric.segment`), which readers map. The first of `ductile.weights.weight_transport.WeightTransport`."""

from collections.abc import Iterable
from math import prod
from secrets import token_hex

import torch
from torch import Tensor

from ductile.fabric.alignment import aligned
from ductile.fabric.segment import Segment, SegmentUnavailable, borrowed, map_segment
from ductile.messages.updates import Digest, digest_text, total_of
from ductile.records import Manifest, TensorEntry
from ductile.weights.buckets import OwnedTensor, dtype_name
from ductile.weights.digest import box_digest


class WeightsUnavailable(Exception):
    """A manifest's weights cannot be had, or are not what it says. The text names the version and the cause."""


class SharedMemory:
    """The published versions of one process, each in a segment, and a reader of other processes' segments."""

    def __init__(self) -> None:
        self._offers: dict[int, tuple[Manifest, Segment]] = {}

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], left_out: Digest = "") -> Manifest:
        """left_out: as `finish` has it."""
        segment = self.begin(version)
        try:
            entries = [_append(segment, name, tensor) for name, tensor in tensors]
            return self.finish(version, segment, entries, left_out)
        except BaseException:
            segment.close()
            raise

    def begin(self, version: int, num_bytes: int = 0) -> Segment:
        """Return a segment to fill with a version's tensors, as `laid_out` has them, and to close where nothing comes
        of it. Raises OSError."""
        # On every host and in every run the name is another one: who writes into the segment knows it by that.
        return Segment(f"ductile-weights-{version}-{token_hex(8)}", num_bytes)

    def finish(self, version: int, segment: Segment, entries: Iterable[TensorEntry], left_out: Digest = "") -> Manifest:
        """Offer a filled segment, until the version is withdrawn, or published again: who asked for it may never have
        heard of this one. Its readers keep what they have received.

        left_out: digest of the version's tensors that receivers have already, and that are not in the segment; "" where
        all are.
        """
        segment.seal()
        tensors = tuple(entries)
        manifest = Manifest(
            version,
            "shared_memory",
            segment.location,
            segment.num_bytes,
            segment.fingerprint,
            tensors,
            total_of([left_out, *(entry.digest for entry in tensors)]),
            is_whole=not left_out,
        )
        before = self._offers.get(version)
        self._offers[version] = manifest, segment
        if before is not None:
            before[1].close()
        return manifest

    def offer(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        return self._offers[version][0] if version in self._offers else self.publish(version, tensors)

    def receive(self, manifest: Manifest) -> dict[str, Tensor]:
        """Return views of the publisher's memory, which is mapped and not copied."""
        try:
            content = map_segment(manifest.location, manifest.num_bytes, manifest.fingerprint)
        except SegmentUnavailable as error:
            raise WeightsUnavailable(f"version {manifest.version} {error}") from error
        return {entry.name: _view(content, entry, manifest) for entry in manifest.tensors}

    def withdraw(self, version: int) -> None:
        for older in [offered for offered in self._offers if offered <= version]:
            self._offers.pop(older)[1].close()

    def close(self) -> None:
        self.withdraw(max(self._offers, default=0))


def laid_out(tensors: Iterable[OwnedTensor]) -> tuple[list[TensorEntry], int]:
    """Return where a version's tensors lie in its segment, without digests, and how many bytes they take. It is where
    `SharedMemory.publish` puts them, one after the other."""
    entries: list[TensorEntry] = []
    end = 0
    for tensor in tensors:
        offset_bytes, num_bytes = aligned(end), prod(tensor.shape) * tensor.dtype.itemsize
        entries.append(TensorEntry(tensor.name, dtype_name(tensor.dtype), tensor.shape, offset_bytes, num_bytes))
        end = offset_bytes + num_bytes
    return entries, end


def _append(segment: Segment, name: str, tensor: Tensor) -> TensorEntry:
    on_cpu = tensor.detach().to("cpu").contiguous()
    offset_bytes = segment.append(on_cpu)
    digest = digest_text(box_digest(name, borrowed(on_cpu), (0,) * tensor.dim()))
    return TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), offset_bytes, tensor.nbytes, digest)


def _view(content: Tensor, entry: TensorEntry, manifest: Manifest) -> Tensor:
    dtype = vars(torch).get(entry.dtype)
    if not isinstance(dtype, torch.dtype):
        raise WeightsUnavailable(f"version {manifest.version}: {entry.name} has the unknown dtype {entry.dtype!r}")
    end = entry.offset_bytes + entry.num_bytes
    if not 0 <= entry.offset_bytes <= end <= len(content):
        raise WeightsUnavailable(
            f"version {manifest.version}: {entry.name} lies at bytes {entry.offset_bytes} to {end} of {len(content)}"
        )
    flat = content[entry.offset_bytes : end].view(dtype)
    try:
        return flat.view(entry.shape)
    except RuntimeError as error:
        raise WeightsUnavailable(
            f"version {manifest.version}: {entry.name} has {entry.num_bytes} bytes, too many or few for {entry.dtype} "
            f"{list(entry.shape)}"
        ) from error
