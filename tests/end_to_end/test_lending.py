"""Runs whose train slots lend their devices: no device ever has two roles, and nobody can tell from what is learned."""

import os
import signal
from pathlib import Path

import pytest

from ductile.cli import main
from ductile.core.scheduling.facts.profile import StepProfile
from tests.end_to_end.runs import Run
from tests.end_to_end.test_scheduling import write_scheduled

NUM_STEPS = 4
ON_POLICY = ("--orchestrator.max-async-level", "0")


def write_lending(folder: Path, model: Path, **changes: object) -> Path:
    """Slots 0 and 1 train, 2 generates, 3 scores; none has memory for two roles."""
    given = {"train": '"0-1"', "generate": "2", "score": 3, "max_steps": NUM_STEPS, "interval": 20}
    config = write_scheduled(folder, model, "tests.end_to_end.moves.Lends", **(given | changes))
    # Two at a time: no generator is ever done with its share before the policy hears of the first completion.
    config.write_text(f"cluster.share_devices = false\ninference.max_num_seqs = 2\n{config.read_text()}")
    return config


def assert_devices_had_one_role(run: Run) -> int:
    """And returns how often they were lent."""
    assert not run.events("policy_failed")
    assert [failure for event in run.events("switched") for failure in event["failures"]] == []
    moved = run.events("parked")
    assert [event["back"] for event in moved] == [False, True] * (len(moved) // 2)
    assert all(event["device_bytes"] == 0 and event["num_bytes"] > 0 for event in moved)
    assert {slot for event in moved for slot in event["slots"]} == {0, 1}
    return len(moved) // 2


@pytest.mark.parametrize("interval", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_devices_are_lent_in_every_step_and_nothing_is_lost(tmp_path, model, start, interval):
    """With a checkpoint after each step: it comes while they are lent, and they are given back for it."""
    run = start(write_lending(tmp_path, model, interval=interval), *ON_POLICY)
    assert run.ends(within_s=90) == 0, run.said()
    assert assert_devices_had_one_role(run) >= NUM_STEPS
    rows = [row for row in run.metrics() if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert [row["trained_tokens"] for row in rows] == [row["sampled_tokens"] for row in rows]
    costs = [StepProfile.from_fields(event).costs for event in run.events("profile")]
    assert costs[-1].park_s > 0
    assert costs[-1].unpark_s > 0
    assert main(["replay", str(run.folder)]) == 0


@pytest.mark.slow
def test_a_generator_that_is_killed_meanwhile_comes_back(tmp_path, model, start):
    run = start(write_lending(tmp_path, model), *ON_POLICY)
    run.until(lambda: bool(run.events("parked")))
    os.kill(pid_of(run, 2), signal.SIGKILL)
    assert run.ends(within_s=90) == 0, run.said()
    assert run.events("slot_restarted")
    assert assert_devices_had_one_role(run) >= NUM_STEPS


@pytest.mark.slow
def test_with_a_train_slot_that_is_killed_meanwhile_the_trainer_goes_back(tmp_path, model, start):
    run = start(write_lending(tmp_path, model), *ON_POLICY)
    run.until(lambda: bool(run.events("parked")))
    os.kill(pid_of(run, 1), signal.SIGKILL)
    assert run.ends(within_s=180) == 0, run.said()
    [back] = run.events("went_back")
    assert (back["lost"], back["after"]) == ([1], [0])
    assert "since slot 1 (train" in back["sentence"], "whether it has begun to generate yet or not"
    assert [row["step"] for row in run.metrics() if row["step"]] == list(range(1, NUM_STEPS + 1))


@pytest.mark.slow
def test_what_was_trained_is_saved_where_ctrl_c_comes_meanwhile(tmp_path, model, start):
    run = start(write_lending(tmp_path, model), *ON_POLICY)
    run.until_step(1)
    run.until(lambda: len(run.events("parked")) % 2 == 1)
    os.kill(run.process.pid, signal.SIGINT)
    run.ends(within_s=60)
    assert run.events("saved"), run.said()
    assert run.events("parked")[-1]["back"]


def pid_of(run: Run, slot: int) -> int:
    return next(event["pid"] for event in run.events("slot_started") if event["slot"] == slot)
