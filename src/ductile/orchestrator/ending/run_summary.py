"""A run in a dozen numbers, out of its `metrics.jsonl`: so it is whole after a resume, too."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def summarise_rl(
    rows: Sequence[Row], slots: Mapping[str, Sequence[int]], wall_s: float, measured_from: int = 0
) -> dict[str, Any]:
    """`summary.json` of `ductile rl`.

    slots: by role, at the end. wall_s: of this life of the run, and what the steps took that earlier lives left in the
    rows. measured_from: as `Progress.measured_from`.
    """
    steps = [row for row in rows if row["step"] > 0]
    evaluated = [row for row in rows if row.get("eval_reward") is not None and row["step"] >= measured_from]
    first, last = (evaluated[0], evaluated[-1]) if evaluated else ({}, {})
    rewards = [row["reward_mean"] for row in steps if row.get("reward_mean") is not None]
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "eval_reward_first": first.get("eval_reward"),
        "eval_step_first": first.get("step"),
        "eval_reward_last": last.get("eval_reward"),
        "eval_step_last": last.get("step"),
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "wall_s": wall_s,
        "tokens_per_s_generate": per_second(steps, "sampled_tokens", ["step_s"]),
        "tokens_per_s_train": per_second(steps, "tokens", ["seconds/forward_backward", "seconds/optim_step"]),
        "sampled_tokens": sum(row.get("sampled_tokens") or 0 for row in steps),
        "steps_without_loss": sum("loss" not in row for row in steps),
        "groups_dropped": steps[-1].get("groups_dropped", 0) if steps else 0,
        "reward_errors": steps[-1].get("reward_errors", 0) if steps else 0,
        "slots": {role: list(held) for role, held in slots.items()},
    }


def since_start(max_steps: int, began_at_step: int, since_start_s: float) -> dict[str, Any]:
    """What every summary says: how far the run was to go, and what was done since it was last started or resumed."""
    return {"max_steps": max_steps, "began_at_step": began_at_step, "since_start_s": since_start_s}


def per_second(rows: Sequence[Row], amount: str, seconds: Sequence[str]) -> float:
    """The rows' `amount` by the sum of their `seconds`; 0 without any."""
    total_s = sum(row.get(name) or 0.0 for row in rows for name in seconds)
    return sum(row.get(amount) or 0.0 for row in rows) / total_s if total_s else 0.0
