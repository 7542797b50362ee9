"""The last words of a command that ran to its end."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ductile.dashboard.view import duration
from ductile.loop.compose import RunResult


def closing_rl(result: RunResult) -> str:
    """Where the model is, what it gained, and three answers to look at."""
    lines = [_took(result.summary)]
    first, last = result.summary["eval_reward_first"], result.summary["eval_reward_last"]
    if first is not None:
        lines.append(f"Held-out reward: {first:.3f} before, {last:.3f} after ({last - first:+.3f}).")
    if result.model_folder:
        lines.append(f"The model is in {result.model_folder} (Hugging Face format).")
    for sample in result.last.samples if result.last else ():
        lines += ["", f"  asked:    {_one_line(sample.question)}", f"  answered: {_one_line(sample.answer)}"]
        lines.append(f"  reward:   {sample.reward:g}")
    return "\n".join(lines)


def closing_batches(summary: Mapping[str, Any], model_folder: Path | None) -> str:
    lines = [_took(summary)]
    if summary["loss_first"] is not None:
        lines.append(f"Loss: {summary['loss_first']:.4f} at the first step, {summary['loss_last']:.4f} at the last.")
    if model_folder and model_folder.exists():
        lines.append(f"The model is in {model_folder} (Hugging Face format).")
    return "\n".join(lines)


def closing_alone(summary: Mapping[str, Any], folder: Path) -> str:
    return "\n".join(
        [
            _took(summary),
            f"Mean reward: {summary['reward_mean']:.3f}.",
            f"The answers are in {folder / 'rollouts.jsonl'}.",
        ]
    )


def _took(summary: Mapping[str, Any]) -> str:
    return f"Done: {summary['steps']} steps in {duration(summary['wall_s'])}."


def _one_line(text: str) -> str:
    return text.strip().replace("\n", "\\n")
