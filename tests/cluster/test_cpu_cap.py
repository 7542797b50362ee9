import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ductile.cgroups import CgroupTree
from ductile.cluster.cpu_cap import PERIOD_US, CapNotPermitted, CpuCap, sweep


def test_no_control_groups_is_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ductile.cluster.cpu_cap.find_tree", lambda *texts: None)
    with pytest.raises(CapNotPermitted, match="cpu_slot_fraction needs Linux control groups"):
        CpuCap(0.25)


def test_version_2_writes_beside_its_own_group(tmp_path: Path):
    own = tmp_path / "run.scope"
    own.mkdir()
    (own / "cgroup.type").write_text("domain")
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    cap = CpuCap(0.25, CgroupTree(2, own))
    group = Path(cap.group(3))
    assert group.parent == tmp_path
    assert (group / "cpu.max").read_text() == f"5000 {PERIOD_US}"
    assert not (group / "cpu.max.burst").exists()  # an old kernel

    (group / "cpu.max.burst").touch()
    cap.group(3)
    assert (group / "cpu.max.burst").read_text() == "5000"


@pytest.mark.parametrize(
    ("controllers", "message"), [("memory", "does not have"), (None, "needs permission to make control groups")]
)
def test_version_2_without_the_controller_is_a_clear_error(tmp_path: Path, controllers: str | None, message: str):
    if controllers:
        (tmp_path / "cgroup.controllers").write_text(controllers)
    with pytest.raises(CapNotPermitted, match=message):
        CpuCap(0.25, CgroupTree(2, tmp_path))


def test_sweeps_what_dead_runs_left(tmp_path: Path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = CpuCap(0.5, CgroupTree(1, tmp_path))
    kept = Path(mine.group(0))
    left = tmp_path / f"ductile-{dead.pid}-123-slot0"
    reused = tmp_path / f"ductile-{os.getpid()}-1-slot0"
    for folder in (left, reused):
        folder.mkdir()
    assert sorted(sweep(tmp_path)) == sorted([left, reused])
    assert kept.exists()


def test_really_caps():
    try:
        cap = CpuCap(0.25)
        group = Path(cap.group(0))
    except CapNotPermitted as reason:
        pytest.skip(str(reason))
    if (burst := group / "cpu.cfs_burst_us").exists():
        assert int(burst.read_text()) == int((group / "cpu.cfs_quota_us").read_text())
    spin = "import time; end = time.monotonic() + 2.5\nwhile time.monotonic() < end: pass"
    process = subprocess.Popen([sys.executable, "-c", spin])
    try:
        (group / "cgroup.procs").write_text(str(process.pid))
        time.sleep(0.3)
        before, start = cpu_s(process.pid), time.monotonic()
        time.sleep(1.6)
        share = (cpu_s(process.pid) - before) / (time.monotonic() - start)
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        cap.close()
    assert share < 0.30
    assert not group.exists()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
