"""Where a process's control groups lie, and what those of memory say, by made-up texts of the kernel."""

from pathlib import Path

import pytest

from ductile.cgroups import CgroupTree, MemoryGroup, find_tree, memory_groups

V1 = "34 32 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:1 - cgroup cgroup rw,cpu,cpuacct"
V2 = "35 32 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
CONTAINER = "34 32 0:29 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"
OTHER = "36 32 0:31 / /proc rw - proc proc rw"


@pytest.mark.parametrize(
    ("mounts", "memberships", "expected"),
    [
        ([OTHER, V2, V1], "4:cpu,cpuacct:/\n0::/", CgroupTree(1, Path("/sys/fs/cgroup/cpu,cpuacct"))),
        ([V1], "4:cpuacct,cpu:/user/a\n", CgroupTree(1, Path("/sys/fs/cgroup/cpu,cpuacct/user/a"))),
        ([CONTAINER], "4:cpu:/docker/abc/x", CgroupTree(1, Path("/sys/fs/cgroup/cpu/x"))),
        ([CONTAINER], "4:cpu:/elsewhere", CgroupTree(1, Path("/sys/fs/cgroup/cpu"))),
        ([OTHER], "", None),
        ([OTHER, V2], "0::/user.slice/run.scope", CgroupTree(2, Path("/sys/fs/cgroup/unified/user.slice/run.scope"))),
    ],
)
def test_finds_the_place_for_groups(mounts: list[str], memberships: str, expected: CgroupTree | None):
    assert find_tree("cpu", "\n".join(mounts), memberships) == expected


def fake_proc(folder: Path, version: int, own: str, files: dict[str, str]) -> Path:
    """A /proc whose process is in group `own` of a tree with these files, by their path in the tree."""
    tree = folder / "tree"
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
        (tree / name).with_name("cgroup.procs").touch()
    (folder / "self").mkdir(exist_ok=True)
    kind = "cgroup cgroup rw,memory" if version == 1 else "cgroup2 cgroup2 rw"
    (folder / "self/mountinfo").write_text(f"34 32 0:29 / {tree} rw - {kind}\n")
    (folder / "self/cgroup").write_text(f"4:memory:{own}\n" if version == 1 else f"0::{own}\n")
    return folder


def test_memory_is_counted_by_a_group_and_those_above_it(tmp_path: Path):
    files = {
        "job/step/memory.max": "max\n",
        "job/step/memory.current": "70",
        "job/step/memory.events": "low 0\noom 1\noom_kill 2\noom_group_kill 0\n",
        "job/memory.max": "100\n",
        "job/memory.peak": "100",
        "job/memory.events": "oom_kill 3\n",
        "cgroup.controllers": "memory",
    }
    assert list(memory_groups(fake_proc(tmp_path, 2, "/job/step", files))) == [
        MemoryGroup(tmp_path / "tree/job/step", None, 70, None, 2),
        MemoryGroup(tmp_path / "tree/job", 100, None, 100, 3),
        MemoryGroup(tmp_path / "tree", None, None, None, None),
    ]


def test_version_1_has_other_names(tmp_path: Path):
    files = {
        "memory.limit_in_bytes": "100",
        "memory.usage_in_bytes": "70",
        "memory.max_usage_in_bytes": "99",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    }
    assert list(memory_groups(fake_proc(tmp_path, 1, "/", files))) == [MemoryGroup(tmp_path / "tree", 100, 70, 99, 2)]


def test_a_kernel_without_groups_has_none(tmp_path: Path):
    assert list(memory_groups(tmp_path)) == []
    assert list(memory_groups(fake_proc(tmp_path, 2, "/gone", {}))) == []
