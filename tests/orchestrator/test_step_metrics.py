from dataclasses import replace
from math import isnan

import pytest

from ductile.orchestrator.ending.run_summary import per_second, summarise_rl
from ductile.orchestrator.loop.step_metrics import StepMetrics
from ductile.records import Prompt, Rollout, RolloutGroup, StepReport


def rollout(reward, versions, finish="stop", **metrics):
    mask = tuple(version >= 0 for version in versions)
    tokens = tuple(range(len(versions)))
    return Rollout(tokens, mask, (0.0,) * len(tokens), tuple(versions), finish, reward, metrics)


def group(*rollouts):
    return RolloutGroup(Prompt("train/0/0", "train", 0, (1, 2, 3)), rollouts)


def test_metrics_of_a_step():
    step_metrics = StepMetrics(version=5)
    step_metrics.add([group(rollout(1.0, [4, 4, 5], right=1.0), rollout(0.0, [3, -1, 4, 4], "length"))], None)
    step_metrics.add(
        [group(rollout(0.5, [5]), rollout(0.5, [5], right=0.0))], StepReport(1, 0.2, 1.0, 1e-3, 2, {"kl": 0.1})
    )
    step_metrics.add([], StepReport(2, 0.4, 3.0, 5e-4, 2, {"kl": 0.3}))
    metrics = step_metrics.row(2.0, {"wait": 0.5, "forward_backward": 0.75, "optim_step": 0.25})
    expected = {
        "reward_mean": 0.5,
        "reward_std": pytest.approx(0.125**0.5),
        "reward_error_share": 0.0,
        "reward_error_share/timeout": 0.0,
        "reward_error_share/lost": 0.0,
        "reward_error_share/raised": 0.0,
        "reward_error_share/wrong": 0.0,
        "length_mean": 2.0,
        "truncated": 0.25,
        "turns_mean": 1.0,
        "off_policy_mean": pytest.approx((1 + 1 + 0 + 2 + 1 + 1 + 0 + 0) / 8),
        "off_policy_max": 2.0,
        "reward_metrics_not_finite": 0.0,
        "groups_equal": 1.0,
        "loss": pytest.approx(0.3),
        "grad_norm": 2.0,
        "lr": 5e-4,
        "trained_tokens": 4.0,
        "train/kl": pytest.approx(0.2),
        "reward/right": 0.5,
        "sampled_tokens": 8.0,
        "tokens": 12 + 9.0,
        "tokens_per_s_generate": 4.0,
        "tokens_per_s_train": 21.0,
        "train_flops": 0.0,
        "step_s": 2.0,
        "seconds/wait": 0.5,
        "seconds/forward_backward": 0.75,
        "seconds/optim_step": 0.25,
    }
    assert metrics == expected


def test_a_failed_reward_is_no_reward():
    step_metrics = StepMetrics(version=0)
    step_metrics.add([group(rollout(1.0, [0]), rollout(None, [0])), group(rollout(0.0, [0]), rollout(None, [0]))], None)
    metrics = step_metrics.row(1.0, {})
    assert (metrics["reward_mean"], metrics["reward_std"], metrics["reward_error_share"]) == (0.5, 0.5, 0.5)
    assert metrics["groups_equal"] == 2
    step_metrics = StepMetrics(version=0)
    step_metrics.add([group(rollout(None, [0]))], None)
    assert isnan(step_metrics.row(1.0, {})["reward_mean"])


def test_a_metric_that_is_no_number_is_left_out_of_its_mean_and_counted():
    completions = [
        rollout(1.0, [0], f1=None, length=2.0),
        rollout(0.0, [0], f1=0.5, length=4.0),
        rollout(0.0, [0], recall=None),
    ]
    step_metrics = StepMetrics(version=0)
    step_metrics.add([group(*completions)], None)
    metrics = step_metrics.row(1.0, {})
    assert {name: value for name, value in metrics.items() if name.startswith("reward/")} == {
        "reward/f1": 0.5,
        "reward/length": 3.0,
    }
    assert metrics["reward_metrics_not_finite"] == 2


def test_failed_rewards_are_counted_by_how_they_failed():
    hows = ["timeout", "timeout", "raised", None, None, None, None, None]
    completions = [replace(rollout(None if how else 1.0, [0]), failure=how) for how in hows]
    step_metrics = StepMetrics(version=0)
    step_metrics.add([group(*completions)], None)
    metrics = step_metrics.row(1.0, {})
    assert {name: value for name, value in metrics.items() if name.startswith("reward_error_share")} == {
        "reward_error_share": 0.375,
        "reward_error_share/timeout": 0.25,
        "reward_error_share/lost": 0.0,
        "reward_error_share/raised": 0.125,
        "reward_error_share/wrong": 0.0,
    }


def test_a_step_that_learned_nothing_has_no_loss():
    step_metrics = StepMetrics(version=0)
    step_metrics.add([group(rollout(1.0, [0]))], None)
    assert {"loss", "tokens_per_s_train"}.isdisjoint(step_metrics.row(1.0, {}))


def test_the_summary_is_made_of_the_rows():
    rows = [
        {"step": 0, "eval_reward": 0.2},
        {"step": 1, "reward_mean": 0.3, "sampled_tokens": 10, "tokens": 20, "step_s": 1, "seconds/optim_step": 1},
        {"step": 2, "reward_mean": 0.4, "sampled_tokens": 30, "tokens": 40, "step_s": 3, "seconds/forward_backward": 2,
         "eval_reward": 0.6},
    ]  # fmt: skip
    for row in rows[1:]:
        row |= {"groups_dropped": 1, "reward_errors": 2}
    rows[2] |= {"loss": 0.1}
    summary = summarise_rl(rows, {"train": (0,)}, wall_s=9)
    assert (summary["steps"], summary["steps_without_loss"]) == (2, 1)
    assert (summary["eval_reward_first"], summary["eval_reward_last"]) == (0.2, 0.6)
    assert (summary["tokens_per_s_generate"], summary["tokens_per_s_train"]) == (10, 20)
    assert summary["slots"] == {"train": [0]}


def test_a_summary_of_nothing():
    summary = summarise_rl([], {}, 1.0)
    assert summary["steps"] == 0
    assert summary["eval_reward_first"] is None
    assert per_second([], "tokens", ["step_s"]) == 0


def test_utilisation_counts_what_all_devices_could_have_done():
    step_metrics = StepMetrics(version=0)
    reports = [StepReport(1, 0.0, 0.0, 0.0, 0, {}, 3e12, 2e12), StepReport(2, 0.0, 0.0, 0.0, 0, {}, 5e12, 4e12)]
    for report in reports:
        step_metrics.add([], report)
    metrics = step_metrics.row(10.0, {"forward_backward": 3.0, "optim_step": 1.0})
    # 8e12 operations; the trainer ended on devices that do 4e12 a second, and was at work for 4 s of 10.
    assert metrics["train_flops"] == 8e12
    assert metrics["mfu"] == pytest.approx(0.2)
    assert metrics["mfu_train"] == pytest.approx(0.5)


def test_a_step_without_a_gradient_takes_no_utilisation_away():
    """It reports no devices, whether it comes last or alone."""
    nothing = StepReport(2, 0.0, 0.0, 1e-3, 0)
    step_metrics = StepMetrics(version=0)
    step_metrics.add([], StepReport(1, 0.0, 0.0, 0.0, 0, {}, 3e12, 2e12))
    step_metrics.add([], nothing)
    assert step_metrics.row(10.0, {})["mfu"] == pytest.approx(0.15)
    alone = StepMetrics(version=0)
    alone.add([], nothing)
    assert {name for name in alone.row(1.0, {}) if "mfu" in name} == set()


def test_without_a_known_device_there_is_no_utilisation():
    step_metrics = StepMetrics(version=0)
    step_metrics.add([], StepReport(1, 0.0, 0.0, 0.0, 0, {}, 3e12, None))
    assert {name for name in step_metrics.row(1.0, {}) if "mfu" in name} == set()
