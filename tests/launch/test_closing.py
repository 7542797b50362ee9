from pathlib import Path

from ductile.launch.closing import closing_alone, closing_batches, closing_rl
from ductile.loop.compose import RunResult
from ductile.loop.evaluate import EvalReport, Sampled

SUMMARY = {"steps": 60, "wall_s": 187.4, "eval_reward_first": 0.21, "eval_reward_last": 0.7}


def test_rl_says_where_the_model_is_what_it_gained_and_shows_answers():
    report = EvalReport(0.7, {1: 0.7}, 9.0, 2, (Sampled("1 + 2 =\n", "[3]\nend", 1.0),))
    assert closing_rl(RunResult(60, SUMMARY, None, report, Path("runs/x/model"))).splitlines() == [
        "Done: 60 steps in 3:07.",
        "Held-out reward: 0.210 before, 0.700 after (+0.490).",
        "The model is in runs/x/model (Hugging Face format).",
        "",
        "  asked:    1 + 2 =",
        "  answered: [3]\\nend",
        "  reward:   1",
    ]


def test_what_the_slots_did_with_their_time_and_what_moving_them_was_to_save():
    spent = {
        "time_by_activity": {"train": 0.1, "generate": 0.7, "idle": 0.196, "switch": 0.004},
        "idle_by_cause": {"tail": 0.15, "waiting_for_batch": 0.046},
        "num_switches": 7,
        "expected_gain_s": 12.34,
    }
    lines = closing_rl(RunResult(60, {**SUMMARY, **spent}, None, None, None)).splitlines()
    assert lines[2:] == [
        "The slots' time: generate 70%, idle 20% (tail 15%, waiting for batch 5%), train 10%.",
        "The scheduler moved slots or rollouts 7 times, to save 12.3 s by its own predictions.",
    ]


def test_a_policy_that_was_refused_is_told_again():
    refused = "The policy is not asked any more, and the slots go back to what the configuration gave them: it failed."
    lines = closing_rl(RunResult(60, {**SUMMARY, "policy_refused": refused}, None, None, None)).splitlines()
    assert refused in lines


def test_one_step_and_one_move_are_singular():
    spent = {"time_by_activity": {"train": 1.0}, "idle_by_cause": {}, "num_switches": 1, "expected_gain_s": None}
    lines = closing_rl(RunResult(1, {**SUMMARY, **spent, "steps": 1}, None, None, None)).splitlines()
    assert lines[0].startswith("Done: 1 step in ")
    assert lines[-1] == "The scheduler moved slots or rollouts 1 time."


def test_slots_that_stay_save_nothing():
    spent = {"time_by_activity": {"train": 1.0}, "idle_by_cause": {}, "num_switches": 0, "expected_gain_s": None}
    lines = closing_rl(RunResult(60, {**SUMMARY, **spent}, None, None, None)).splitlines()
    assert lines[2:] == ["The slots' time: train 100%."]


def test_without_evaluation_or_export_it_is_short():
    summary = {**SUMMARY, "eval_reward_first": None, "eval_reward_last": None}
    assert closing_rl(RunResult(60, summary, None, None, None)) == "Done: 60 steps in 3:07."


def test_the_others(tmp_path: Path):
    summary = {"steps": 2, "wall_s": 5, "loss_first": 2.0, "loss_last": 1.5, "reward_mean": 0.25}
    assert closing_batches(summary, tmp_path).splitlines() == [
        "Done: 2 steps in 0:05.",
        "Loss: 2.0000 at the first step, 1.5000 at the last.",
        f"The model is in {tmp_path} (Hugging Face format).",
    ]
    assert f"The answers are in {tmp_path / 'rollouts.jsonl'}." in closing_alone(summary, tmp_path)
