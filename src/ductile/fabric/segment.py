"""Memory of one process that others on this host may read: sealed, anonymous, and gone with its owner.

    segment = Segment("ductile-weights-3")
    offset_bytes = segment.append(tensor)              as often as there is something
    segment.seal()
    segment.location, segment.num_bytes, segment.fingerprint        told to others, who
    content = map_segment(location, num_bytes, fingerprint)         read it
    segment.close()

One whose size is known may be filled by several processes, before its owner seals it:

    segment = Segment("ductile-weights-3-1f0c", num_bytes)
    with mapped_for_writing(location, name, num_bytes) as content:    in each of them
        content[...] = ...

A segment is a memfd. Readers open it through `/proc/<pid>/fd/<n>` and map it, so that any number of them share one
copy, and nothing can be left behind: when its owner ends, however it ends, the kernel frees the segment as soon as the
last reader unmaps it. Once sealed, not even its owner can change it.

Where a run has several nodes, a location also says on which host that path is, and where processes of others get the
bytes (`ductile.fabric.remote_segments`): "/proc/12/fd/7|<host>|tcp://10.0.0.1:4711/<id>".
"""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex
from weakref import WeakValueDictionary

import numpy as np
import torch
import xxhash
from torch import Tensor

from ductile.fabric.alignment import aligned
from ductile.fabric.process import host

READ_BYTES = 1 << 20


class SegmentUnavailable(Exception):
    """A segment cannot be read, or is not what was said of it. The text goes on after its name: "is gone: ..."."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a segment: its location, taken apart."""

    path: str
    host: str = ""
    """The host on which the path is; "" for this one."""
    url: str = ""

    @classmethod
    def of(cls, location: str) -> "_Place":
        return cls(*location.split("|"))

    @property
    def is_here(self) -> bool:
        return self.host in ("", host())


OPEN: "WeakValueDictionary[str, Segment]" = WeakValueDictionary()
"""Segments of this process, by id."""
_url = ""
_fetch: "Callable[[str, int], Tensor] | None" = None


def set_url(url: str, fetch: "Callable[[str, int], Tensor]") -> None:
    """Say in locations, from now on, that other nodes get segments at `url`, and get those of other nodes by
    `fetch(url, num_bytes)`."""
    global _url, _fetch
    _url, _fetch = url, fetch


class Segment:
    def __init__(self, name: str, num_bytes: int = 0) -> None:
        """Make a segment of so many zero bytes. Raises OSError where they cannot be had.

        name: /proc shows it; who is to write into the segment knows it by its name."""
        self.name = name
        self._id = token_hex(16)
        self._reading = threading.Lock()
        """Held while the descriptor is closed, and while another thread reads it for another node."""
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.num_bytes = num_bytes
        self.fingerprint = 0
        """64-bit, over all bytes in order (xxh3), once it is sealed. It guards against accidents, not against an
        attacker who wants two contents to collide."""
        if num_bytes:
            try:
                # Memory that is not there shows now: to who writes into a mapping it would be the end of the process.
                os.posix_fallocate(self._fd, 0, num_bytes)
            except BaseException:
                self.close()
                raise

    @property
    def path(self) -> str:
        """Path at which processes of this host open it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def location(self) -> str:
        """Place of it for all processes of the run."""
        return f"{self.path}|{host()}|{_url}/{self._id}" if _url else self.path

    def append(self, tensor: Tensor) -> int:
        """Copy a tensor (any device, dtype and strides) to the end. Returns where it begins, in bytes."""
        on_cpu = tensor.detach().to("cpu").contiguous()
        offset_bytes = aligned(self.num_bytes)
        self._write(memoryview(bytes(offset_bytes - self.num_bytes)))
        self._write(_bytes_of(on_cpu))
        return offset_bytes

    def seal(self) -> None:
        """Seal the segment: nothing can be added or changed any more. No process may have it mapped for writing. Raises
        OSError."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS | F_SEAL_FUTURE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_WRITE)  # Linux before 5.1
        self.fingerprint = self._read_fingerprint()
        OPEN[self._id] = self

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return so many bytes of a sealed segment, from any thread; b"" once it is closed."""
        with self._reading:
            return os.pread(self._fd, num_bytes, offset) if self._fd >= 0 else b""

    def close(self) -> None:
        """Free it. Readers that map it keep what they have."""
        OPEN.pop(self._id, None)
        with self._reading:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def _read_fingerprint(self) -> int:
        """Read all bytes without a mapping, which takes a descriptor: there may be none left."""
        digest, buffer, done = xxhash.xxh3_64(), memoryview(bytearray(READ_BYTES)), 0
        while num_read := os.preadv(self._fd, [buffer], done):
            digest.update(buffer[:num_read])
            done += num_read
        return digest.intdigest()

    def _write(self, content: memoryview) -> None:
        written = 0
        while written < len(content):  # one call writes at most 2 GiB
            written += os.pwrite(self._fd, content[written:], self.num_bytes + written)
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
"""The value in linux/fcntl.h; fcntl has it from Python 3.13 on. Who seals a segment knows that nobody has it mapped
for writing, so this keeps it as it is, like F_SEAL_WRITE. That one fails with EBUSY while somebody else holds one of
its pages, as the kernel does to move it."""
MADV_POPULATE_WRITE = 23
"""The value in linux/mman.h, which `mmap` does not have."""
POPULATED_BYTES = 1 << 24
"""Memory that is got at once. `mmap.madvise` keeps all other threads of the process waiting: half a second and more for
a GiB."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def map_segment(location: str, num_bytes: int, fingerprint: int) -> Tensor:
    """All bytes of a segment, which are not copied; those of a segment of another node are fetched. Raises
    `SegmentUnavailable`.

    The mapping is private: it may be written to, which changes no other reader's. It lives as long as any view of it
    does, also after the segment is closed or its owner dies.
    """
    content = _content(_Place.of(location), num_bytes) if num_bytes else torch.empty(0).byte()
    found = xxhash.xxh3_64_intdigest(content.numpy().data)
    if found != fingerprint:
        raise SegmentUnavailable(
            f"is damaged: the fingerprint of {location} is {found:016x}, and {fingerprint:016x} was announced"
        )
    return content


def map_copy(path: str, num_bytes: int) -> Tensor:
    """All bytes of a segment of this host that is none of an owner's own: what is in it is looked at by who asked for
    it. Raises `SegmentUnavailable`."""
    return torch.frombuffer(_map(path, num_bytes), dtype=torch.uint8)


def _content(place: _Place, num_bytes: int) -> Tensor:
    if place.is_here:
        return torch.frombuffer(_map(place.path, num_bytes), dtype=torch.uint8)
    if _fetch is None:
        raise SegmentUnavailable(f"is on another host, {place.host}, which this process does not reach")
    return _fetch(place.url, num_bytes)


@contextmanager
def mapped_for_writing(
    location: str, name: str, num_bytes: int, spans: Iterable[tuple[int, int]] = ()
) -> Iterator[Tensor]:
    """All bytes of another process's segment, or of this one's, before it is sealed. Who writes to them writes to the
    segment. Once the block is left, no view of them may be used. Raises `SegmentUnavailable` where there is no segment
    of this name, as on another host, and `OSError` where it cannot be mapped.

    The mapping is gone with the block, whoever still refers to the tensor: nothing that is mapped can be sealed.

    spans: where each piece that will be written begins and ends. Their pages are got in one go."""
    place = _Place.of(location)
    if not place.is_here:
        raise SegmentUnavailable(f"cannot be written: it is on another host, {place.host}")
    location = place.path
    try:
        found = os.readlink(location)
        if found != f"/memfd:{name} (deleted)":  # on another host the path may be any file, which must not be opened
            raise SegmentUnavailable(f"cannot be written: {location} is {found} here, and not the memory {name}")
        fd = os.open(location, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError) as error:
        raise SegmentUnavailable(f"cannot be written: {location}: {error.strerror}") from error
    try:
        mapping = mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)
    try:
        _populate(mapping, spans)
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        yield torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)
    finally:
        mapping.close()


def _populate(mapping: mmap.mmap, spans: Iterable[tuple[int, int]]) -> None:
    """Get pages before they are written to. Writing to new memory takes a quarter less time then."""
    try:
        for begin, end in spans:
            for first in range(begin // mmap.PAGESIZE * mmap.PAGESIZE, end, POPULATED_BYTES):
                mapping.madvise(MADV_POPULATE_WRITE, first, min(POPULATED_BYTES, end - first))
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 5.14
            raise


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
