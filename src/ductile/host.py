"""What this machine has, as far as a process may use it."""

import os
from pathlib import Path

_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Files with the memory limit of a control group, v2 and v1, below where control groups are mounted: in a container,
the limit of its own group."""


def memory_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may use: the machine's, or less where its container has a limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_limit(groups / name) for name in _LIMITS]
    return min([machine, *(limit for limit in limits if limit is not None)])


def is_amd_with_avx512(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor is one of AMD's whose vectors have 512 bits. False where nothing says so."""
    try:
        first, _, _ = cpuinfo.read_text().partition("\n\n")
    except OSError:
        return False
    fields = {name.strip(): value for name, _, value in (line.partition(":") for line in first.splitlines())}
    return fields.get("vendor_id", "").strip() == "AuthenticAMD" and "avx512f" in fields.get("flags", "").split()


def _limit(file: Path) -> int | None:
    """The limit that the file holds, in bytes; None where there is no such group, or no limit ("max")."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
