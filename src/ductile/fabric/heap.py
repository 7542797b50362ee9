"""The C library's heap. It keeps what was freed for whoever asks next (`ductile.launch.local.FREED_MEMORY_STAYS`)."""

import ctypes

_libc = ctypes.CDLL(None)


def give_back() -> None:
    """What is free goes back to the system: the next tenant of this slot, or another slot, needs it."""
    _libc.malloc_trim(0)
