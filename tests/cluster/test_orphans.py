"""Whatever is killed, nothing of a run stays behind: real processes, real signals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from ductile.cluster.cpu_cap import CapNotPermitted, CpuCap
from ductile.transport.sockets import SocketFolder
from tests.cluster.processes import processes_with
from tests.nightly import mostly_nightly

GONE_WITHIN_S = 120.0
"""More than the deadlines of a stop together: on a machine that is busy, each of them may be used up."""


class Orchestrator:
    """`tests.cluster.orchestrate` in a process of its own, with a variable that marks all it starts."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark = f"DUCTILE_TEST={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.temporary = Path(tempfile.mkdtemp(prefix="orphans-", dir="/tmp"))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.orchestrate", str(folder), *arguments],
            stdout=subprocess.PIPE,
            env={**os.environ, name: value, "TMPDIR": str(self.temporary)},
        )
        assert self.process.stdout is not None
        self.pids = json.loads(self.process.stdout.readline())

    def sockets(self) -> list[Path]:
        return list(self.temporary.glob("ductile-*"))

    def wait(self) -> None:
        """Raises TimeoutExpired, after the orchestrator has written to stderr where it is."""
        try:
            self.process.wait(GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            raise

    def assert_all_gone(self) -> None:
        deadline = time.monotonic() + GONE_WITHIN_S
        while (left := processes_with(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left == {}

    def close(self) -> None:
        for pid in processes_with(self.mark):
            with suppress(ProcessLookupError):  # it was about to end
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        shutil.rmtree(self.temporary)


@pytest.fixture
def start(tmp_path: Path):
    started = []

    def make(*arguments: str) -> Orchestrator:
        started.append(Orchestrator(tmp_path, *arguments))
        return started[-1]

    yield make
    for orchestrator in started:
        orchestrator.close()


def kill_orchestrator(run: Orchestrator) -> None:
    run.process.kill()


def kill_orchestrator_while_a_slot_is_stopped(run: Orchestrator) -> None:
    os.kill(run.pids["slots"][0], signal.SIGSTOP)
    run.process.kill()


def kill_orchestrator_while_everything_is_stopped(run: Orchestrator) -> None:
    for pid in [*run.pids["slots"], run.pids["server"], run.process.pid]:
        os.kill(pid, signal.SIGSTOP)
    run.process.kill()


def kill_orchestrator_and_server(run: Orchestrator) -> None:
    os.kill(run.pids["slots"][1], signal.SIGSTOP)
    run.process.kill()
    os.kill(run.pids["server"], signal.SIGKILL)


def hang_up(run: Orchestrator) -> None:
    run.process.send_signal(signal.SIGHUP)


def interrupt_the_whole_group(run: Orchestrator) -> None:
    group = processes_with(run.mark)
    assert run.process.pid in group
    for pid in group:
        with suppress(ProcessLookupError):  # the first ones that hear of it end the others
            os.kill(pid, signal.SIGINT)


@pytest.mark.parametrize(
    "end",
    mostly_nightly(
        [
            kill_orchestrator,
            kill_orchestrator_while_a_slot_is_stopped,
            kill_orchestrator_while_everything_is_stopped,
            kill_orchestrator_and_server,
            hang_up,
            interrupt_the_whole_group,
        ],
        kill_orchestrator_while_everything_is_stopped,
        kill_orchestrator_and_server,
        interrupt_the_whole_group,
    ),
    ids=lambda end: end.__name__,
)
def test_nothing_is_left(start, end):
    run = start()
    assert len(processes_with(run.mark)) == 6  # orchestrator, process server, store, three slots
    (folder,) = run.sockets()
    end(run)
    run.wait()
    run.assert_all_gone()
    if folder.exists():  # nobody was left to remove it: the next run does
        assert end is kill_orchestrator_and_server
        SocketFolder([str(run.temporary)]).remove()
    assert run.sockets() == []


def test_what_is_sent_to_the_whole_group_ends_no_process_but_the_orchestrator(start):
    """A batch system's SIGTERM, a lost terminal: the orchestrator decides, and saves the step first."""
    run = start()
    others = set(processes_with(run.mark)) - {run.process.pid}
    assert len(others) == 5
    for pid in others:
        assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= ignored_by(pid)
    run.process.kill()
    run.wait()
    run.assert_all_gone()


def ignored_by(pid: int) -> set[signal.Signals]:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")), 16)
    return {signum for signum in signal.Signals if mask >> (signum - 1) & 1}


def test_control_groups_go_with_a_killed_orchestrator(start):
    try:
        groups = CpuCap(0.5)._parent
    except CapNotPermitted as reason:
        pytest.skip(str(reason))
    run = start("0.5")
    mine = list(groups.glob(f"ductile-{run.process.pid}-*"))
    assert len(mine) == 3
    run.process.kill()
    run.wait()
    run.assert_all_gone()
    assert not any(group.exists() for group in mine)
