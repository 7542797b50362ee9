"""This machine's resources, as far as a process may use them, and sentences for where they were too little."""

import errno
import os
import platform
import re
import resource
from pathlib import Path

from ductile.cgroups import PROC, count_in, memory_groups
from ductile.disk import FULL, DiskError, free_bytes, show_bytes

SHARED_MEMORY = Path("/dev/shm")
_FEW_BYTES = 1 << 20
_NO_MEMORY = ("Unable to allocate", "can't allocate memory")
"""Words of numpy and torch for memory that is not a GPU's."""


def memory_bytes(proc: Path = PROC) -> int:
    """Memory that this process may use: the machine's, or less where a control group has a limit, such as that of its
    container or of its job."""
    limits = [group.limit_bytes for group in memory_groups(proc)]
    return min([_machine_bytes(), *(limit for limit in limits if limit is not None)])


def memory_now(proc: Path = PROC) -> str:
    """Limit and use of memory, in words: of the control group with the lowest limit, or of the machine."""
    limited = [group for group in memory_groups(proc) if (group.limit_bytes or _machine_bytes()) < _machine_bytes()]
    if not limited:
        available = count_in(proc / "meminfo", "MemAvailable:")
        left = "" if available is None else f", {show_bytes(available << 10)} of them free now"
        return f"no control group has a limit, and the machine has {show_bytes(_machine_bytes())}{left}"
    group = min(limited, key=lambda group: group.limit_bytes or 0)
    use = {"in use now": group.used_bytes, "at most": group.most_used_bytes}
    said = "".join(f", {show_bytes(number)} {when}" for when, number in use.items() if number is not None)
    return f"limit of {group.folder} {show_bytes(group.limit_bytes or 0)}{said}"


def shared_memory_now() -> str:
    """Size and use of the machine's shared memory, in words."""
    try:
        now = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return f"{SHARED_MEMORY}: {error.strerror}"
    room, size = now.f_bavail * now.f_frsize, now.f_blocks * now.f_frsize
    more = ", which is too little: give the container more (--shm-size)" if room < _FEW_BYTES else ""
    return f"{SHARED_MEMORY} has {show_bytes(size)}, {show_bytes(room)} of them free now{more}"


def shortage(error: BaseException) -> str:
    """ " (at most 1024 open files: ulimit -n)": limit and use of what was too little; "" for another error, and for one
    that says so itself."""
    number = error.errno if isinstance(error, OSError) and not isinstance(error, DiskError) else None
    if number == errno.EMFILE:
        return f" (at most {_limit(resource.RLIMIT_NOFILE)} open files: ulimit -n)"
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if number == errno.EFBIG and soft != resource.RLIM_INFINITY:
        return f" (at most {show_bytes(soft)} in a file: ulimit -f)"
    if number == errno.EAGAIN or "can't start new thread" in str(error):
        return f" (at most {_limit(resource.RLIMIT_NPROC)} processes and threads of a user: ulimit -u)"
    if number in FULL and isinstance(error, OSError) and isinstance(error.filename, str):
        return f" ({show_bytes(free_bytes(Path(error.filename).absolute()))} free)"
    is_plain = isinstance(error, MemoryError) and not str(error)
    if number == errno.ENOMEM or is_plain or any(words in str(error) for words in _NO_MEMORY):
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        return f" ({memory_now() if soft == resource.RLIM_INFINITY else f'at most {show_bytes(soft)}: ulimit -v'})"
    return ""


def _limit(limit: int) -> str:
    soft, _ = resource.getrlimit(limit)
    return "any number of" if soft == resource.RLIM_INFINITY else str(soft)


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def is_amd_with_avx512(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor is one of AMD's whose vectors have 512 bits. False where nothing says so."""
    try:
        first, _, _ = cpuinfo.read_text().partition("\n\n")
    except OSError:
        return False
    fields = {name.strip(): value for name, _, value in (line.partition(":") for line in first.splitlines())}
    return fields.get("vendor_id", "").strip() == "AuthenticAMD" and "avx512f" in fields.get("flags", "").split()


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name as the kernel has it; where a host hides which of a maker's it is, with family and
    model."""
    try:
        keys = dict(re.findall(r"^(.+?)\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE))
    except OSError:
        keys = {}
    name = keys.get("model name") or platform.processor() or platform.machine()
    if re.search(r"\d", name) or "model" not in keys:
        return name
    return f"{name}, family {keys['cpu family']} model {keys['model']}"


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
