"""Memory of zeros for buffers that live long.

Those that others read are in huge pages where the kernel has them, which the heap has not for threads other than the
main one. Fingerprints are taken a third faster from huge pages, and reads are a tenth faster.
"""

import ctypes
import math
import mmap

import torch

HUGE_BYTES = 2 << 20
_libc = ctypes.CDLL(None)


def zeros(size: int, dtype: torch.dtype, device: str | torch.device, *, pin_memory: bool = False) -> torch.Tensor:
    """A flat tensor whose pages are all there, so that no transfer waits for them later. It is torch's own memory,
    which can be freed and filled again while tensors refer to it (`ductile.trainer.parking`)."""
    if pin_memory:
        return torch.zeros(size, dtype=dtype, device=device, pin_memory=True)
    num_bytes = size * dtype.itemsize
    if torch.device(device).type != "cpu" or num_bytes < HUGE_BYTES:
        return torch.zeros(size, dtype=dtype, device=device)
    memory = torch.empty(size, dtype=dtype)
    first, end = -(-memory.data_ptr() // mmap.PAGESIZE), (memory.data_ptr() + num_bytes) // mmap.PAGESIZE
    # A kernel without huge pages refuses: then they are small.
    start, length = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t((end - first) * mmap.PAGESIZE)
    _libc.madvise(start, length, mmap.MADV_HUGEPAGE)
    return memory.zero_()


def zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor whose pages the system fills with zeros when they are first used, on a CPU: a slot that is lent to
    generation waits for no block that is never used. (`torch.zeros` writes them all: 0.3 s of a core for 100 MiB where
    memory is new.)"""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
