"""Memory of one process that others on this host may read: sealed, anonymous, and gone with its owner.

    segment = Segment("ductile-weights-3")
    offset_bytes = segment.append(tensor)              as often as there is something
    segment.seal()
    segment.location, segment.num_bytes, segment.fingerprint        told to others, who
    content = map_segment(location, num_bytes, fingerprint)         read it
    segment.close()

A segment is a memfd. Readers open it through `/proc/<pid>/fd/<n>` and map it, so that any number of them share one
copy, and nothing can be left behind: when its owner ends, however it ends, the kernel frees the segment as soon as the
last reader unmaps it. Once sealed, not even its owner can change it.
"""

import ctypes
import errno
import fcntl
import mmap
import os

import torch
import xxhash
from torch import Tensor

ALIGNMENT_BYTES = 64
"""Each tensor starts at a multiple of this: a cache line, and the widest vector load."""


class SegmentUnavailable(Exception):
    """A segment cannot be read, or is not what was said of it. The text goes on after its name: "is gone: ..."."""


class Segment:
    def __init__(self, name: str) -> None:
        """Make an empty segment. `name` is for people: /proc shows it."""
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._digest = xxhash.xxh3_64()
        self.num_bytes = 0

    @property
    def location(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def fingerprint(self) -> int:
        """64-bit, over all bytes in order (xxh3). It guards against accidents, not against an attacker who wants two
        contents to collide."""
        return self._digest.intdigest()

    def append(self, tensor: Tensor) -> int:
        """Copy a tensor (any device, dtype and strides) to the end. Returns where it begins, in bytes."""
        on_cpu = tensor.detach().to("cpu").contiguous()
        padding = bytes(-self.num_bytes % ALIGNMENT_BYTES)
        self._write(memoryview(padding))
        offset_bytes = self.num_bytes
        self._write(_bytes_of(on_cpu))
        return offset_bytes

    def seal(self) -> None:
        """Seal the segment: nothing can be added or changed any more."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS | F_SEAL_FUTURE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_WRITE)  # Linux before 5.1

    def close(self) -> None:
        """Free it. Readers that map it keep what they have."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _write(self, content: memoryview) -> None:
        written = 0
        while written < len(content):  # one call writes at most 2 GiB
            written += os.pwrite(self._fd, content[written:], self.num_bytes + written)
        self._digest.update(content)
        self.num_bytes += len(content)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, for as long as that is there. `Tensor.numpy` would do, but for ever
    forbid to free the memory of a tensor that others hold, as FSDP2 does with what it has gathered."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def borrowed(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor on the CPU as another tensor, for as long as that is there: what is done with
    it, such as `Tensor.numpy`, does not keep the memory from being freed."""
    if not tensor.nbytes:
        return tensor
    return torch.frombuffer(_bytes_of(tensor), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


F_SEAL_FUTURE_WRITE = 0x0010
"""The value in linux/fcntl.h; fcntl has it from Python 3.13 on. A segment is never mapped for writing, so this keeps it
as it is, like F_SEAL_WRITE. That one fails with EBUSY while somebody else holds one of its pages, as the kernel does to
move it."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def map_segment(location: str, num_bytes: int, fingerprint: int) -> Tensor:
    """All bytes of a segment, which are not copied. Raises `SegmentUnavailable`.

    The mapping is private: it may be written to, which changes no other reader's. It lives as long as any view of it
    does, also after the segment is closed or its owner dies.
    """
    content = torch.frombuffer(_map(location, num_bytes), dtype=torch.uint8) if num_bytes else torch.empty(0).byte()
    found = xxhash.xxh3_64_intdigest(content.numpy().data)
    if found != fingerprint:
        raise SegmentUnavailable(
            f"is damaged: the fingerprint of {location} is {found:016x}, and {fingerprint:016x} was announced"
        )
    return content


def _map(location: str, num_bytes: int) -> mmap.mmap:
    try:
        fd = os.open(location, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise SegmentUnavailable(
            f"is gone: {location} cannot be opened ({error.strerror}); its owner ended or withdrew it"
        ) from error
    except OSError as error:
        raise SegmentUnavailable(f"cannot be read: {location}: {error.strerror}") from error
    try:
        # The descriptor's number may serve another file by now; a file of another size never gets mapped.
        size_bytes = os.fstat(fd).st_size
        if size_bytes != num_bytes:
            raise SegmentUnavailable(
                f"is gone: {location} has {size_bytes} bytes, and {num_bytes} were announced; its owner withdrew it"
            )
        return mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise SegmentUnavailable(f"cannot be read: {location}: {error.strerror}") from error
    finally:
        os.close(fd)
