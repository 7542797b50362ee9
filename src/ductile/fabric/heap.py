"""The C library's heap, which keeps what was freed for the next allocation
(`ductile.cluster.node.FREED_MEMORY_STAYS`), and what torch keeps on a GPU in the same way."""

import ctypes

import torch

_libc = ctypes.CDLL(None)


def trim() -> None:
    """What is free goes back to the system: the next tenant of this slot, or another slot, needs it."""
    _libc.malloc_trim(0)


def trim_all() -> None:
    """Does what `trim` does; torch also gives back what is free on a GPU, if this process has used one."""
    trim()
    torch.cuda.empty_cache()
