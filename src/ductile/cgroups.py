"""Linux control groups: where this process's own ones lie, and what those that count memory say."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PROC = Path("/proc")
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    2: ("memory.max", "memory.current", "memory.peak", "memory.events"),
}
"""Files of a group, by the version: limit, use now, most use ever, and counters of events."""


@dataclass(frozen=True, slots=True)
class CgroupTree:
    """A process's own place among the control groups that one controller has."""

    version: Literal[1, 2]
    folder: Path


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group that counts memory, and may limit it. None stands for what the kernel does not say."""

    folder: Path
    limit_bytes: int | None
    """None: as much as the group above it may have."""
    used_bytes: int | None
    most_used_bytes: int | None
    num_killed: int | None
    """Processes that the kernel killed for lack of memory: `oom_kill`. Version 2 counts those of groups below, too."""


def find_tree(controller: str, mounts: str, memberships: str) -> CgroupTree | None:
    """Place of a process, by the texts of its mountinfo and cgroup in /proc; None where no groups are mounted."""
    own = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        for each in controllers.split(","):  # "" is version 2
            own[each] = path
    version_2 = None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup" and controller in options.split(","):
            return CgroupTree(1, _inside(mount, root, own.get(controller, "/")))
        if kind == "cgroup2":
            version_2 = CgroupTree(2, _inside(mount, root, own.get("", "/")))
    return version_2


def memory_groups(proc: Path = PROC) -> Iterator[MemoryGroup]:
    """This process's own group and those above it, from the inside outwards; none where the kernel has none."""
    try:
        tree = find_tree("memory", (proc / "self/mountinfo").read_text(), (proc / "self/cgroup").read_text())
    except (OSError, ValueError):
        return
    if tree is None:
        return
    limit, used, most, events = _FILES[tree.version]
    for folder in (tree.folder, *tree.folder.parents):
        if not (folder / "cgroup.procs").exists():
            return  # above the place where the tree is mounted
        killed = count_in(folder / events, "oom_kill")
        yield MemoryGroup(folder, _number(folder / limit), _number(folder / used), _number(folder / most), killed)


def count_in(file: Path, name: str) -> int | None:
    """The number behind `name` in a file of the kernel's with a name and a number a line; None where it has none."""
    with suppress(OSError, ValueError):
        counts = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
        return int(counts[name].split()[0]) if name in counts else None


def _number(file: Path) -> int | None:
    """The number that the file holds; None where there is no such file, or no limit ("max")."""
    with suppress(OSError, ValueError):
        return int(file.read_text())


def _inside(mount: str, root: str, own: str) -> Path:
    """The folder of group `own` where the part of the tree below `root` is mounted on `mount`."""
    below = os.path.relpath(own, root)
    return Path(mount) if below.startswith("..") or below == "." else Path(mount, below)
