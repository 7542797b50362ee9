"""The machine that we run on, where only the operating system knows."""

import os


def memory_bytes() -> int:
    """Of the whole machine, whoever uses it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
