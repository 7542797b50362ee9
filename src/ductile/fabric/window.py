"""Memory of this process that others on this host may map, and then copy from as if it were theirs.

    buffers = allocate({"weight": (torch.float32, 1000), "bias": (torch.float32, 10)})
    windows()                                       told to the others: what there is to map
    place(buffers["bias"].data_ptr())               (window, bytes from its beginning)
    content = window.map(process)                   on the other side

A window is a memfd, and all buffers that are allocated together lie in one. It has no name in any file system: it is
freed with the last tensor in it, and with its owner, however that ends, as soon as the last reader unmaps it. Unlike a
published `Segment` it is not sealed: its owner goes on writing to it, and readers read when that is agreed.
"""

import mmap
import os
import weakref
from collections.abc import Mapping
from errno import ESTALE

import msgspec
import torch

from ductile.fabric.process import Process

ALIGNMENT_BYTES = 64
"""Each buffer starts at a multiple of this: a cache line, and the widest vector load."""


class Window(msgspec.Struct, frozen=True):
    """As its owner tells others of it."""

    key: int
    """The inode: never that of another window, while a descriptor's number or an address may serve again."""
    fd: int
    address: int
    """At its owner."""
    num_bytes: int

    def map(self, process: Process) -> mmap.mmap:
        """Its bytes, in its owner or in any other process, with all page tables filled. Raises `OSError` when it is
        not there any more."""
        fd = os.open(f"/proc/{process.pid}/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_ino != self.key:
                raise OSError(ESTALE, os.strerror(ESTALE))
            return mmap.mmap(fd, self.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)


_windows: dict[int, Window] = {}
"""This process's own, by key."""


def allocate(sizes: Mapping[str, tuple[torch.dtype, int]]) -> dict[str, torch.Tensor]:
    """Flat tensors of zeros, by name: (dtype, elements). Their pages are all there, so that nobody waits for them."""
    ends: dict[str, int] = {}
    num_bytes = 0
    for name, (dtype, size) in sizes.items():
        num_bytes += -num_bytes % ALIGNMENT_BYTES + size * dtype.itemsize
        ends[name] = num_bytes
    if not num_bytes:
        return {name: torch.zeros(size, dtype=dtype) for name, (dtype, size) in sizes.items()}
    whole = _open(num_bytes)
    return {
        name: whole[ends[name] - size * dtype.itemsize : ends[name]].view(dtype)
        for name, (dtype, size) in sizes.items()
    }


def windows() -> tuple[Window, ...]:
    """Those that this process has."""
    return tuple(_windows.copy().values())


def place(address: int) -> tuple[int, int]:
    """The window that memory of this process lies in, by key, and how far from its beginning; zeros for ordinary
    memory."""
    for window in windows():
        if window.address <= address < window.address + window.num_bytes:
            return window.key, address - window.address
    return 0, 0


def _open(num_bytes: int) -> torch.Tensor:
    fd = os.memfd_create("ductile-window", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        pages = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
    except OSError:
        os.close(fd)
        raise
    pages.madvise(mmap.MADV_HUGEPAGE)  # heeded where /sys/kernel/mm/transparent_hugepage/shmem_enabled is "advise"
    whole = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    key = os.fstat(fd).st_ino
    _windows[key] = Window(key, fd, whole.data_ptr(), num_bytes)
    weakref.finalize(pages, _close, key).atexit = False
    return whole


def _close(key: int) -> None:
    """Its last tensor is gone."""
    os.close(_windows.pop(key).fd)
