"""A run that is killed in every way, again and again, and goes on each time where its last checkpoint was."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import Run, checkpointed_steps, summary, write_config
from tests.nightly import mostly_nightly

MAX_STEPS = 400


def assert_curve_is_intact(before: list[dict[str, Any]], after: list[dict[str, Any]], resumed_from: int) -> None:
    """Every step once, in order; those before the checkpoint exactly as they were first written."""
    assert [row["step"] for row in after] == list(range(len(after)))
    kept = [row for row in before if row["step"] <= resumed_from]
    assert after[: len(kept)] == kept


def live(start, config: Path, end, steps: int = 2) -> Run:
    """One life: go on from what is there, train `steps` steps, be ended."""
    folder = config.parent / "run"
    saved = max(checkpointed_steps(folder), default=0)
    life = start(config, "--resume")
    before = life.metrics()
    life.until_step(saved + steps)
    assert life.graders()  # so `Run.ends` sees when one is left
    end(life)
    assert_curve_is_intact(before, life.metrics(), saved)
    assert len(life.events("resumed")) == (1 if saved else 0)
    return life


def kill_slot(role: str):
    def end(life: Run) -> None:
        pid = life.pid_of(role)
        os.kill(pid, signal.SIGKILL)
        assert life.ends() == 1
        assert f"({role}, pid {pid}) was killed by SIGKILL while" in life.said()
        assert "Go on with: ductile rl @" in life.said()
        assert life.events("died")

    return end


def lose_slot(role: str):
    """The run goes on, with the slot again: it ends when it is asked to."""

    def end(life: Run) -> None:
        pid = life.pid_of(role)
        os.kill(pid, signal.SIGKILL)
        life.until(lambda: life.events("slot_restarted"))
        [lost], [restarted] = life.events("slot_lost"), life.events("slot_restarted")
        assert f"({role}, pid {pid}) was killed by SIGKILL while" in lost["sentence"]
        assert (restarted["slot"], restarted["roles"]) == (lost["slot"], [role])
        life.until_step(life.metrics()[-1]["step"] + 2)
        life.process.send_signal(signal.SIGINT)
        assert life.ends() == 130
        assert life.metrics()[-1]["groups_dropped"] == 0

    return end


def kill_orchestrator(life: Run) -> None:
    pids = [life.process.pid, *(event["pid"] for event in life.events("slot_started"))]
    life.process.kill()
    assert life.ends() == -signal.SIGKILL
    assert not [path for path in Path("/dev/shm").iterdir() if any(str(pid) in path.name for pid in pids)]
    # The file that says how to reach it is still there, and nobody trusts it.
    assert (life.folder / "control.json").exists()
    command = [sys.executable, "-m", "ductile", "resize", "--run", str(life.folder), "--train", "0-1"]
    stale = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert stale.returncode == 2
    assert f"process {life.process.pid}, which wrote its control.json, has ended" in stale.stderr


@pytest.mark.slow
def test_every_kind_of_death(tmp_path: Path, model: Path, start):
    config = write_config(tmp_path, model, max_steps=MAX_STEPS)
    for end in (kill_slot("train"), lose_slot("generate"), kill_orchestrator, lose_slot("score")):
        live(start, config, end)
    steps = max(checkpointed_steps(tmp_path / "run"))
    assert steps >= 4  # each life has saved a step at least
    last = start(config, "--resume", "--max-steps", str(steps + 1))
    assert last.ends(within_s=60) == 0, last.said()
    assert [row["step"] for row in last.metrics()] == list(range(steps + 2))
    assert summary(tmp_path / "run")["steps"] == steps + 1


@pytest.mark.slow
@pytest.mark.parametrize("num_lives", mostly_nightly([2, 10], 2))
def test_ctrl_c_at_random_moments(tmp_path: Path, model: Path, start, num_lives: int):
    config = write_config(tmp_path, model, max_steps=MAX_STEPS)
    chance = random.Random(7)
    for _ in range(num_lives):
        saved = max(checkpointed_steps(tmp_path / "run"), default=0)
        life = start(config, "--resume")
        before = life.metrics()
        if chance.random() < 0.6:
            life.until_step(saved + 1)
        else:
            life.until(lambda life=life: life.events("slot_started"))
        time.sleep(chance.uniform(0, 1))  # two or three steps
        life.process.send_signal(signal.SIGINT)
        assert life.ends() == 130, life.said()
        assert "as asked. Logs:" in life.said()
        assert_curve_is_intact(before, life.metrics(), saved)
        trained = max((row["step"] for row in life.metrics()), default=0)
        assert max(checkpointed_steps(tmp_path / "run"), default=0) == trained, "what was trained is saved"


@pytest.mark.nightly
def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, model: Path, start):
    life = start(write_config(tmp_path, model, max_steps=MAX_STEPS, interval=MAX_STEPS))
    life.until_step(1)
    os.kill(life.pid_of("train"), signal.SIGSTOP)  # so that the step never ends
    life.press_twice()
    assert life.ends() == 130
    assert "Stopped at once, as asked." in life.said()


@pytest.mark.nightly
def test_a_stopped_slot_is_found_by_its_silence(tmp_path: Path, model: Path, start):
    life = start(write_config(tmp_path, model, max_steps=MAX_STEPS), "--cluster.heartbeat-timeout-s", "3")
    life.until_step(1)
    pid = life.pid_of("score")
    os.kill(pid, signal.SIGSTOP)
    life.until(lambda: life.events("slot_restarted"))
    assert f"(score, pid {pid}) was silent for" in life.events("slot_lost")[0]["sentence"]
    life.process.send_signal(signal.SIGINT)
    assert life.ends() == 130


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder(tmp_path: Path, model: Path, start):
    config = write_config(tmp_path, model, max_steps=MAX_STEPS)
    first = start(config)
    first.until(lambda: first.events("slot_started"))
    second = start(config, "--resume")
    assert second.ends(within_s=30) == 2
    assert f"is in use by another run (process {first.process.pid})" in second.said()
