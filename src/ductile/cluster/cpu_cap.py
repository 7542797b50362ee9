"""Caps on CPU time: each slot's process gets a share of one core, so that slots behave like devices of fixed speed.

Linux control groups do it, version 1 (the `cpu` controller's own tree) or 2 (one tree for all). Each slot has a group

    <our place in the tree>/ductile-<orchestrator's pid>-<its start time>-slot<n>

with a quota of `fraction` of every 20 ms. What a slot could not use of one period, because the machine's host gave the
core to another process, it may use in the next, where the kernel can do that (Linux 5.14). The process server puts the
process in and removes the group after it. Should orchestrator and process server both be killed, the empty groups stay
until the next capped run sweeps them.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from ductile.cgroups import PROC, CgroupTree, find_tree
from ductile.fabric.process import start_time

PERIOD_US = 20_000
"""Period of the quota: short, so that a slot which ran out waits 20 ms and not 100; at 5 ms the kernel's own accounting
shows."""


class CapNotPermitted(Exception):
    """`cluster.cpu_slot_fraction` cannot be kept here. The text says why, and what to do."""


class CpuCap:
    """Makes the groups of one run. `group(slot)` may be given to any number of slots."""

    def __init__(self, fraction: float, tree: CgroupTree | None = None) -> None:
        self._fraction = fraction
        self._tree = tree or _own_tree()
        self._parent = _parent_of_groups(self._tree)
        self._run = f"ductile-{os.getpid()}-{start_time(os.getpid())}"
        sweep(self._parent)

    def group(self, slot: int) -> str:
        """Make the slot's group with its quota; returns the folder, which the process server puts the slot into."""
        folder = self._parent / f"{self._run}-slot{slot}"
        quota_us = round(self._fraction * PERIOD_US)
        try:
            folder.mkdir(exist_ok=True)
            if self._tree.version == 1:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
                burst = folder / "cpu.cfs_burst_us"
            else:
                (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
                burst = folder / "cpu.max.burst"
            if burst.exists():
                burst.write_text(str(quota_us))
        except OSError as error:
            raise _not_permitted(folder, error) from error
        return str(folder)

    def close(self) -> None:
        """Remove the groups that are empty. The process server has removed those whose process it saw end."""
        for folder in self._parent.glob(f"{self._run}-slot*"):
            with suppress(OSError):
                folder.rmdir()


def sweep(parent: Path) -> list[Path]:
    """Remove the empty groups of runs whose orchestrator is gone. Returns them."""
    swept = []
    for folder in parent.glob("ductile-*-slot*"):
        named = re.fullmatch(r"ductile-(\d+)-(\d+)-slot\d+", folder.name)
        if named and start_time(int(named[1])) != int(named[2]):
            with suppress(OSError):
                folder.rmdir()
                swept.append(folder)
    return swept


def _own_tree() -> CgroupTree:
    tree = find_tree("cpu", (PROC / "self/mountinfo").read_text(), (PROC / "self/cgroup").read_text())
    if tree is None:
        raise CapNotPermitted("cluster.cpu_slot_fraction needs Linux control groups, and none are mounted here")
    return tree


def _parent_of_groups(tree: CgroupTree) -> Path:
    """Version 2 forbids processes beside groups with controllers, so there ours go beside our own group, not in it."""
    if tree.version == 1:
        return tree.folder
    is_root = not (tree.folder / "cgroup.type").exists()
    parent = tree.folder if is_root else tree.folder.parent
    try:
        if "cpu" not in (parent / "cgroup.controllers").read_text().split():
            raise CapNotPermitted(
                f"cluster.cpu_slot_fraction needs the cpu controller, which {parent} does not have; "
                "leave cpu_slot_fraction out, or start with: systemd-run --user --scope -p Delegate=yes"
            )
        if "cpu" not in (parent / "cgroup.subtree_control").read_text().split():
            (parent / "cgroup.subtree_control").write_text("+cpu")
    except OSError as error:
        raise _not_permitted(parent, error) from error
    return parent


def _not_permitted(folder: Path, error: OSError) -> CapNotPermitted:
    return CapNotPermitted(
        f"cluster.cpu_slot_fraction needs permission to make control groups: {folder}: {error.strerror}. "
        "Run as root or with a delegated group (systemd-run --user --scope -p Delegate=yes), or leave it out"
    )
