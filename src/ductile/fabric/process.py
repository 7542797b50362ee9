"""Which process, for certain: numbers come again, start times do not."""

import os
from dataclasses import dataclass
from pathlib import Path

NODE_VARIABLE = "DUCTILE_NODE"
"""Variable of the environment: number of the node that a process belongs to, where a run has several."""

_BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
"""Name of the machine since it was booted. It is read at once: later there may be no descriptor left."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    started: int
    """Start of the process, in clock ticks after boot."""

    @classmethod
    def own(cls) -> "Process":
        return cls(os.getpid(), start_time(os.getpid()) or 0)

    @property
    def alive(self) -> bool:
        return start_time(self.pid, zombies=False) == self.started


def host() -> str:
    """Name of the host, equal for processes that see each other under the same process ids.

    Nodes of a run count as different hosts, also where they are on one machine: they may be different containers."""
    node = os.environ.get(NODE_VARIABLE)
    return f"{_BOOT} {os.readlink('/proc/self/ns/pid')}{f' node {node}' if node else ''}"


def start_time(pid: int, zombies: bool = True) -> int | None:
    """Start of the process, in clock ticks after boot; None when there is none.

    zombies: whether one that has ended, and whose parent has not asked how, counts as well.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[18]) if zombies or state not in "ZX" else None
