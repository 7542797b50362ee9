"""Which process, for certain: a number alone may belong to another one tomorrow."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    started: int
    """When the process started, in clock ticks after boot."""

    @classmethod
    def own(cls) -> "Process":
        return cls(os.getpid(), _start_of(os.getpid()))

    @property
    def alive(self) -> bool:
        return _start_of(self.pid) == self.started


def host() -> str:
    """Name of the host, equal for processes that see each other under the same process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _start_of(pid: int) -> int:
    """When the process started; 0 when there is none, or it is only waiting to be buried."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(fields[18])
