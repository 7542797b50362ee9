"""The last words of a command that ran to its end."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ductile.core.instances.placement import many
from ductile.dashboard.causes import named
from ductile.dashboard.printable import printable
from ductile.dashboard.view import duration
from ductile.orchestrator.commands.compose import RunResult


def rl_summary(result: RunResult) -> str:
    """Says where the model is and what it gained, and shows three completions."""
    lines = [_took(result.summary)]
    lines += _held_out(result.summary)
    if num_equal := result.summary["steps_without_loss"]:
        of_all = f"{num_equal} of {many(result.summary['steps'], 'step')}"
        lines.append(f"Nothing was learned in {of_all}: all rewards of each group were equal.")
    if result.summary["reward_errors"]:
        failed = many(int(result.summary["reward_errors"]), "reward")
        lines.append(f"{failed} failed, and their rollouts were not trained on: see reward_error in events.jsonl.")
    lines += _slots_time(result.summary)
    if result.model_folder:
        lines.append(f"The model is in {result.model_folder} (Hugging Face format).")
    if result.last and result.last.step != result.summary["steps"]:
        lines.append(f"Completions {_when(result.last.step)}:")
    for sample in result.last.samples if result.last else ():
        lines += ["", f"  prompt:     {_one_line(sample.prompt)}", f"  completion: {_one_line(sample.completion)}"]
        lines.append(f"  reward:   {'none, it failed' if sample.reward is None else f'{sample.reward:g}'}")
    return "\n".join(lines)


def batches_summary(summary: Mapping[str, Any], model_folder: Path | None) -> str:
    lines = [_took(summary)]
    if summary["loss_first"] is not None:
        lines.append(f"Loss: {summary['loss_first']:.4f} at the first step, {summary['loss_last']:.4f} at the last.")
    if model_folder and model_folder.exists():
        lines.append(f"The model is in {model_folder} (Hugging Face format).")
    return "\n".join(lines)


def rollout_only_summary(summary: Mapping[str, Any], folder: Path) -> str:
    return "\n".join(
        [
            _took(summary),
            f"Mean reward: {summary['reward_mean']:.3f}.",
            f"The completions are in {folder / 'rollouts.jsonl'}.",
        ]
    )


def _held_out(summary: Mapping[str, Any]) -> list[str]:
    """What was measured, and when: a run that was stopped may not have been measured since."""
    (before, first), (after, last) = (
        (summary[f"eval_step_{n}"], summary[f"eval_reward_{n}"]) for n in ("first", "last")
    )
    if first is None:
        return []
    if before == after:
        since = "" if after == summary["steps"] else "; it has not been measured since"
        return [f"Held-out reward: {first:.3f} {_when(before)}{since}."]
    began = "before" if before == 0 else _when(before)
    ended = "after" if after == summary["steps"] else _when(after)
    return [f"Held-out reward: {first:.3f} {began}, {last:.3f} {ended} ({last - first:+.3f})."]


def _when(step: int) -> str:
    return f"after step {step}" if step else "before any training"


def _slots_time(summary: Mapping[str, Any]) -> list[str]:
    """The ledger in a line, and what moving slots was meant to save."""
    lines: list[str] = []
    if activities := summary.get("time_by_activity"):
        causes = {"idle": _shares(summary["idle_by_cause"])}
        lines.append(f"The slots' time: {_shares(activities, causes)}.")
    if summary.get("num_switches"):
        expected_s = summary["expected_gain_s"]
        expected = f", to save {expected_s:.1f} s by its own predictions" if expected_s is not None else ""
        lines.append(f"The scheduler moved slots or rollouts {many(summary['num_switches'], 'time')}{expected}.")
    if refused := summary.get("policy_refused"):
        lines.append(refused)
    return lines


def _shares(shares: Mapping[str, float], parts: Mapping[str, str] | None = None) -> str:
    """ "generate 50%, idle 30% (tail 30%)": the largest first, none below half a per cent.

    parts: what some of them are made of.
    """
    behind = {name: f" ({part})" for name, part in (parts or {}).items() if part}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{named(name)} {share:.0%}{behind.get(name, '')}" for name, share in ordered if share >= 0.005)


def _took(summary: Mapping[str, Any]) -> str:
    steps, max_steps, began_at_step = summary["steps"], summary["max_steps"], summary["began_at_step"]
    done = f"Stopped after step {steps} of {max_steps}," if steps < max_steps else f"Done: {many(steps, 'step')}"
    here = ""
    if began_at_step:
        here = f", {steps - began_at_step} of these steps since it was resumed, in {duration(summary['since_start_s'])}"
    return f"{done} in {duration(summary['wall_s'])}{here}."


def _one_line(text: str) -> str:
    return printable(text.strip())
