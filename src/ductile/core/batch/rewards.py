"""Rewards that are there, and those that failed: a failed reward is no reward, and too many of them end a run."""

from collections.abc import Iterable, Sequence

from ductile.records import Rollout


def scored(rollouts: Iterable[Rollout]) -> list[float]:
    """Rewards of the rollouts that have one."""
    return [rollout.reward for rollout in rollouts if rollout.reward is not None]


def too_many_failed(rollouts: Sequence[Rollout], max_share: float) -> str | None:
    """Why the run must not go on, in a sentence; None when at most `max_share` of the rewards failed."""
    errors = [rollout.error for rollout in rollouts if rollout.reward is None]
    if len(errors) <= max_share * len(rollouts):
        return None
    return f"{len(errors)} of {len(rollouts)} rewards failed; the last time {errors[-1]}"
