"""What a training step is told of in `metrics.jsonl`: the groups it used and what the trainer made of them.

reward_mean, reward_std          over the batch's completions that could be scored
length_mean                      sampled tokens a completion; truncated: the share that hit its limit
off_policy_mean, off_policy_max  versions between a sampled token and the weights it trains
loss, grad_norm, lr              of the trainer, mean over the step's optimizer steps; more as train/<name>
tokens_per_s_generate            sampled tokens of the batch by the step's wall time
tokens_per_s_train               prompt and sampled tokens by the seconds that the trainer was at work
train_flops                      floating-point operations of the model in training, all train slots together
mfu, mfu_train                   train_flops by what the train slots' devices do at best, in the step's wall time and in
                                 the seconds that the trainer was at work; missing where nothing was trained, or a
                                 device's best is not known
seconds/<phase>                  wall time by phase; phases overlap
reward/<name>                    what the task's reward reports besides; mean of what was a finite number
reward_metrics_not_finite        how many of these metrics were not, over the batch's completions
groups_equal, groups_dropped     groups whose rewards are all equal; groups that were too old (since the start)
groups_refused                   with tokens of weights that were never published (since the start)
dropped_tokens                   sampled in vain, in finished completions of groups that were too old (since the start)
dropped_length_mean              of these completions; above length_mean, long completions are not learned from
stopped_completions              of groups that were too old, stopped before they were finished (since the start)
sampled_length_mean, trained_length_mean   sampled tokens a completion (since the start): of all that were finished, and
                                 of those that steps were made of; apart, what is learned from is not what is sampled
canaries_checked, canaries_skipped, canaries_disagreed    generators and versions (since the start)
canary_difference                largest one between log-probs of the latest version that was compared
published_bytes                  of the new weights that the step gives to slots: with adapters, of these alone
train_slots, resizes             of the trainer, at the step's end; resizes since the start
seconds/resize                   in which the trainer stood still for resizes; part of the other phases' time
reward_error_share               of the batch's completions that could not be scored, and so are not trained on
reward_error_share/<how>         its parts: timeout, lost (its process ended), raised, wrong (returned something else)
reward_errors                    rewards and replies that failed (since the start)
"""

from collections.abc import Iterable, Mapping, Sequence
from math import nan, sqrt

from ductile.core.batch.advantage import all_equal
from ductile.core.batch.rewards import scored
from ductile.records import REWARD_FAILURES, Rollout, RolloutGroup, StepReport

AT_WORK = ("forward_backward", "optim_step")
"""The phases in which the trainer computes."""


class StepMetrics:
    """What one step has trained on. `add` each optimizer step's share, then ask for its `row`."""

    def __init__(self, version: int) -> None:
        """version: of the weights that the step trains."""
        self.version = version
        self._groups: list[RolloutGroup] = []
        self._reports: list[StepReport] = []
        self.num_updates = 0
        """Optimizer steps whose share was added."""

    def add(self, groups: Iterable[RolloutGroup], report: StepReport | None) -> None:
        """Add one optimizer step's share; without a report when there was nothing to learn from."""
        self.num_updates += 1
        self._groups += groups
        if report is not None:
            self._reports.append(report)

    @property
    def groups(self) -> Sequence[RolloutGroup]:
        return self._groups

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self._groups for rollout in group.rollouts]

    @property
    def num_tokens(self) -> int:
        """Prompt and completion, of every completion."""
        return sum(group.num_tokens for group in self._groups)

    def row(self, step_s: float, seconds: Mapping[str, float]) -> dict[str, float]:
        rollouts = self.rollouts
        rewards = scored(rollouts)
        reward_mean = _mean(rewards)
        ages = [self.version - rollout.versions.array[rollout.mask.array] for rollout in rollouts]
        num_sampled = sum(map(len, ages))
        train_s = sum(seconds.get(phase, 0.0) for phase in AT_WORK)
        values = {
            "reward_mean": reward_mean if rewards else nan,
            "reward_std": sqrt(_mean([(reward - reward_mean) ** 2 for reward in rewards])) if rewards else nan,
            "reward_error_share": 1 - len(rewards) / len(rollouts) if rollouts else 0.0,
            "length_mean": num_sampled / max(1, len(rollouts)),
            "truncated": _mean([float(rollout.finish_reason == "length") for rollout in rollouts]),
            "turns_mean": _mean([float(rollout.num_turns) for rollout in rollouts]),
            "off_policy_mean": sum(int(of_rollout.sum()) for of_rollout in ages) / max(1, num_sampled),
            "off_policy_max": float(max((int(of_rollout.max(initial=0)) for of_rollout in ages), default=0)),
            **_shares_failed(rollouts),
            "reward_metrics_not_finite": float(sum(list(rollout.metrics.values()).count(None) for rollout in rollouts)),
            "groups_equal": float(sum(all_equal(scored(group.rollouts)) for group in self._groups)),
        }
        if self._reports:
            values |= {
                "loss": _mean([report.loss for report in self._reports]),
                "grad_norm": _mean([report.grad_norm for report in self._reports]),
                "lr": self._reports[-1].lr,
                "trained_tokens": float(sum(report.num_tokens for report in self._reports)),
                "tokens_per_s_train": self.num_tokens / max(train_s, 1e-9),
                **utilisation(self._reports, step_s, train_s),
            }
        values |= {f"train/{name}": value for name, value in mean_by_name([r.metrics for r in self._reports]).items()}
        values |= {f"reward/{name}": value for name, value in mean_by_name([r.metrics for r in rollouts]).items()}
        values |= {
            "sampled_tokens": float(num_sampled),
            "tokens": float(self.num_tokens),
            "tokens_per_s_generate": num_sampled / max(step_s, 1e-9),
            "step_s": step_s,
        }
        return values | {f"seconds/{phase}": spent_s for phase, spent_s in seconds.items()}


def utilisation(reports: Sequence[StepReport], step_s: float, train_s: float) -> dict[str, float]:
    """FLOPs and MFU of the train slots. Their peak is that of the last of these optimizer steps that reports one: a
    step without a gradient does not."""
    flops = sum(report.flops for report in reports)
    peak = next((report.peak_flops_per_s for report in reversed(reports) if report.peak_flops_per_s), None)
    if peak is None:
        return {"train_flops": flops}
    seconds = {"mfu": step_s, "mfu_train": train_s}
    return {"train_flops": flops} | {name: flops / (max(s, 1e-9) * peak) for name, s in seconds.items()}


def _shares_failed(rollouts: Sequence[Rollout]) -> dict[str, float]:
    how = [rollout.failure for rollout in rollouts]
    return {f"reward_error_share/{each}": how.count(each) / max(1, len(how)) for each in REWARD_FAILURES}


def mean_by_name(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Each name's mean over the rows that have a number for it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: _mean(each) for name, each in values.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
