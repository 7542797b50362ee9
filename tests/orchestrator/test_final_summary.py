from pathlib import Path

import pytest

from ductile.orchestrator.commands.compose import RunResult
from ductile.orchestrator.ending.final_summary import batches_summary, rl_summary, rollout_only_summary
from ductile.orchestrator.loop.evaluate import EvalReport, Sampled

SUMMARY = {
    "steps": 60,
    "max_steps": 60,
    "began_at_step": 0,
    "wall_s": 187.4,
    "since_start_s": 187.4,
    "eval_reward_first": 0.21,
    "eval_step_first": 0,
    "eval_reward_last": 0.7,
    "eval_step_last": 60,
    "steps_without_loss": 0,
    "reward_errors": 0,
}


def report(step: int) -> EvalReport:
    return EvalReport(0.7, {1: 0.7}, 9.0, 2, 0.0, (Sampled("1 + 2 =\n", "[3]\nend", 1.0),), step)


def test_rl_says_where_the_model_is_what_it_gained_and_shows_completions():
    assert rl_summary(RunResult(SUMMARY, report(60), Path("runs/x/model"))).splitlines() == [
        "Done: 60 steps in 3:07.",
        "Held-out reward: 0.210 before, 0.700 after (+0.490).",
        "The model is in runs/x/model (Hugging Face format).",
        "",
        "  prompt:     1 + 2 =",
        "  completion: [3]\\nend",
        "  reward:   1",
    ]


@pytest.mark.parametrize(("num_equal", "of_all"), [(60, "60 of 60 steps"), (1, "1 of 60 steps")])
def test_steps_in_which_nothing_was_learned_are_told_at_the_end_too(num_equal: int, of_all: str):
    said = rl_summary(RunResult({**SUMMARY, "steps_without_loss": num_equal}, report(60), None))
    assert f"\nNothing was learned in {of_all}: all rewards of each group were equal.\n" in said


def test_what_was_measured_before_training_only_is_not_told_as_its_result():
    summary = {**SUMMARY, "steps": 47, "eval_reward_last": 0.21, "eval_step_last": 0}
    assert rl_summary(RunResult(summary, report(0), None)).splitlines() == [
        "Stopped after step 47 of 60, in 3:07.",
        "Held-out reward: 0.210 before any training; it has not been measured since.",
        "Completions before any training:",
        "",
        "  prompt:     1 + 2 =",
        "  completion: [3]\\nend",
        "  reward:   1",
    ]


@pytest.mark.parametrize(
    ("measured", "line"),
    [
        ({"eval_step_last": 40}, "Held-out reward: 0.210 before, 0.700 after step 40 (+0.490)."),
        ({"eval_step_first": 20}, "Held-out reward: 0.210 after step 20, 0.700 after (+0.490)."),
        ({"eval_step_first": 60, "eval_reward_first": 0.7}, "Held-out reward: 0.700 after step 60."),
        (
            {"eval_step_first": 40, "eval_step_last": 40, "eval_reward_last": 0.21},
            "Held-out reward: 0.210 after step 40; it has not been measured since.",
        ),
    ],
)
def test_every_held_out_reward_says_when_it_was_measured(measured: dict[str, float], line: str):
    assert rl_summary(RunResult({**SUMMARY, **measured}, None, None)).splitlines()[1] == line


def test_several_lives_are_told_apart():
    resumed = {**SUMMARY, "began_at_step": 47, "since_start_s": 24.0}
    first, *_ = rl_summary(RunResult(resumed, None, None)).splitlines()
    assert first == "Done: 60 steps in 3:07, 13 of these steps since it was resumed, in 0:24."
    first, *_ = rl_summary(RunResult({**resumed, "steps": 48}, None, None)).splitlines()
    assert first == "Stopped after step 48 of 60, in 3:07, 1 of these steps since it was resumed, in 0:24."


def test_what_the_slots_did_with_their_time_and_what_moving_them_was_to_save():
    spent = {
        "time_by_activity": {"train": 0.1, "generate": 0.7, "idle": 0.196, "switch": 0.004},
        "idle_by_cause": {"tail": 0.15, "waiting_for_batch": 0.046},
        "num_switches": 7,
        "expected_gain_s": 12.34,
    }
    lines = rl_summary(RunResult({**SUMMARY, **spent}, None, None)).splitlines()
    assert lines[2:] == [
        "The slots' time: generate 70%, idle 20% (tail 15%, waiting for batch 5%), train 10%.",
        "The scheduler moved slots or rollouts 7 times, to save 12.3 s by its own predictions.",
    ]


def test_a_policy_that_was_refused_is_told_again():
    refused = "The policy is not asked any more, and the slots go back to what the configuration gave them: it failed."
    lines = rl_summary(RunResult({**SUMMARY, "policy_refused": refused}, None, None)).splitlines()
    assert refused in lines


def test_one_step_and_one_move_are_singular():
    spent = {"time_by_activity": {"train": 1.0}, "idle_by_cause": {}, "num_switches": 1, "expected_gain_s": None}
    lines = rl_summary(RunResult({**SUMMARY, **spent, "steps": 1, "max_steps": 1}, None, None)).splitlines()
    assert lines[0].startswith("Done: 1 step in ")
    assert lines[-1] == "The scheduler moved slots or rollouts 1 time."


def test_slots_that_stay_save_nothing():
    spent = {"time_by_activity": {"train": 1.0}, "idle_by_cause": {}, "num_switches": 0, "expected_gain_s": None}
    lines = rl_summary(RunResult({**SUMMARY, **spent}, None, None)).splitlines()
    assert lines[2:] == ["The slots' time: train 100%."]


def test_without_evaluation_or_export_it_is_short():
    summary = {**SUMMARY, "eval_reward_first": None, "eval_reward_last": None}
    assert rl_summary(RunResult(summary, None, None)) == "Done: 60 steps in 3:07."


def test_the_others(tmp_path: Path):
    summary = {
        "steps": 2,
        "max_steps": 2,
        "began_at_step": 0,
        "wall_s": 5,
        "loss_first": 2.0,
        "loss_last": 1.5,
        "reward_mean": 0.25,
    }
    assert batches_summary(summary, tmp_path).splitlines() == [
        "Done: 2 steps in 0:05.",
        "Loss: 2.0000 at the first step, 1.5000 at the last.",
        f"The model is in {tmp_path} (Hugging Face format).",
    ]
    assert f"The completions are in {tmp_path / 'rollouts.jsonl'}." in rollout_only_summary(summary, tmp_path)
