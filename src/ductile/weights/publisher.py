"""The trainer's side of a publish: one version's tensors in one sealed, anonymous memory segment.

The segment is a memfd of this process. Receivers open it through `/proc/<pid>/fd/<n>` and map it, so that any number
of them on this host share one copy, and nothing can be left behind: when this process ends, however it ends, the
kernel frees the segment as soon as the last receiver unmaps it. Once sealed, not even we can change it.
"""

import fcntl
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ductile.records import Manifest, TensorEntry
from ductile.weights.fingerprint import fingerprint

ALIGNMENT_BYTES = 64
"""Each tensor starts at a multiple of this: a cache line, and the widest vector load."""


@dataclass(frozen=True, slots=True)
class _Segment:
    version: int
    fd: int


class Publisher:
    """Holds the published versions of one process until they are withdrawn."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(segment.version for segment in self._segments)

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Copy the tensors (full, any device, any dtype) into a new segment and describe it.

        The iterable is consumed one tensor at a time, so it may gather each only when asked for it.
        """
        if version in self.versions:
            raise ValueError(f"version {version} is published already; withdraw it first")
        fd = os.memfd_create(f"ductile-weights-{version}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            entries, num_bytes = _write(fd, tensors)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            manifest = Manifest(
                version=version,
                carrier="shared_memory",
                location=f"/proc/{os.getpid()}/fd/{fd}",
                num_bytes=num_bytes,
                fingerprint=_fingerprint_of(fd, num_bytes),
                tensors=tuple(entries),
            )
        except BaseException:
            os.close(fd)
            raise
        self._segments.append(_Segment(version, fd))
        return manifest

    def withdraw(self, version: int) -> None:
        """Free this version and all older ones. Receivers that map them keep what they have."""
        for segment in [segment for segment in self._segments if segment.version <= version]:
            self._segments.remove(segment)
            os.close(segment.fd)

    def close(self) -> None:
        """Withdraw everything."""
        while self._segments:
            os.close(self._segments.pop().fd)


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def _write(fd: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[TensorEntry], int]:
    entries: list[TensorEntry] = []
    offset_bytes = 0
    for name, tensor in tensors:
        content = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
        written = 0
        while written < len(content):  # one call writes at most 2 GiB
            written += os.pwrite(fd, content[written:], offset_bytes + written)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), offset_bytes, len(content)))
        offset_bytes += -(-len(content) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    os.ftruncate(fd, offset_bytes)
    return entries, offset_bytes


def _fingerprint_of(fd: int, num_bytes: int) -> int:
    if num_bytes == 0:
        return fingerprint(b"")
    with mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ) as mapped:
        view = memoryview(mapped)
        try:
            return fingerprint(view)
        finally:
            view.release()
