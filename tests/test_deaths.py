"""How a process ended, with what the machine tells of it. The kernel really kills one for lack of memory."""

import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ductile import deaths
from ductile.deaths import OomKills, ending
from tests.test_cgroups import fake_proc

CGROUP = Path("/sys/fs/cgroup/memory")

IN_A_SMALL_GROUP = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from ductile.deaths import ending
for limited in (True, False):
    pid = os.fork()
    if not pid:
        held = [b"x" * (1 << 20) for _ in range(200)] if limited else []
        os.kill(os.getpid(), 9)
    print(ending(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
"""


def test_a_process_that_the_kernel_killed_for_lack_of_memory_is_told_from_one_that_somebody_killed():
    group = CGROUP / f"ductile-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError:
        with suppress(OSError):
            group.rmdir()
        pytest.skip("needs leave to make memory groups of version 1")
    try:
        told = subprocess.run(
            [sys.executable, "-c", IN_A_SMALL_GROUP, str(group)], capture_output=True, text=True, check=True, timeout=60
        ).stdout.splitlines()
    finally:
        group.rmdir()
    assert told[0].startswith(
        f"was killed by SIGKILL (the kernel's OOM killer took it: oom_kill of {group} went from 0 to 1; "
        f"limit of {group} 67.1 MB, "
    )
    assert told[0].endswith(" 67.1 MB at most)")
    assert told[1] == "was killed by SIGKILL"


def test_each_kill_is_told_once(tmp_path: Path):
    """What was counted before is of others, and so is what only a group above has counted."""

    def count(step: int, job: int) -> None:
        files = {"job/step/memory.events": f"oom_kill {step}", "job/memory.events": f"oom_kill {job}"}
        fake_proc(tmp_path, 2, "/job/step", files | {"job/memory.max": "4000000", "job/memory.current": "3000000"})

    count(5, 6)
    kills = OomKills(tmp_path)
    count(5, 8)
    assert kills.tell() == ""
    count(7, 10)
    for before in (5, 6):
        assert kills.tell() == (
            f"the kernel's OOM killer took it: oom_kill of {tmp_path}/tree/job/step went from {before} to 7; "
            f"limit of {tmp_path}/tree/job 4.0 MB, 3.0 MB in use now"
        )
    assert kills.tell() == ""


def test_where_no_group_counts_the_machine_is_asked(tmp_path: Path):
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 9\n")
    kills = OomKills(tmp_path)
    assert kills.tell() == ""
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 10\n")
    told = kills.tell()
    assert f"may have taken it: oom_kill of {tmp_path}/vmstat went from 9 to 10; no control group has a limit" in told


@pytest.mark.parametrize(
    ("code", "cpu_s", "expected"),
    [
        (0, None, "ended with exit code 0"),
        (7, None, "ended with exit code 7"),
        (137, None, "ended with exit code 137 (SIGKILL)"),
        (-signal.SIGTERM, None, "was killed by SIGTERM"),
        (-signal.SIGSEGV, None, "was killed by SIGSEGV (its log says where)"),
        (-signal.SIGKILL, 3.0, "was killed by SIGKILL"),
        (-signal.SIGKILL, 60.0, "was killed by SIGKILL (it took 60 s of CPU time, and may take 60 s: ulimit -t)"),
        (-signal.SIGXCPU, 60.2, "was killed by SIGXCPU (it took 60 s of CPU time, and may take 60 s: ulimit -t)"),
        (-signal.SIGXCPU, None, "was killed by SIGXCPU (it took more CPU time than it may)"),
        (-70, None, "was killed by signal 70"),
    ],
)
def test_a_signal_has_the_cause_that_the_machine_tells(
    code: int, cpu_s: float | None, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (60, resource.RLIM_INFINITY))
    monkeypatch.setattr(deaths, "OOM_KILLS", OomKills(tmp_path))
    assert ending(code, cpu_s, logs_faults=True) == expected


def test_a_bus_error_tells_of_shared_memory():
    assert ending(-signal.SIGBUS).startswith("was killed by SIGBUS (memory behind a file was not to be had: /dev/shm")
