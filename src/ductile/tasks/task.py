"""What is common to all tasks: their error, and how their answers are read.

The protocol itself is `ductile.roles.Task`.
"""

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from numbers import Real

from ductile.roles import Task


class TaskError(Exception):
    """A task that cannot be made or used. The text is a sentence: what is wrong, where, and what to write instead."""


def takes_turns(task: Task) -> bool:
    """Whether the environment may speak again after the policy did. A task of one turn need not define `reply`."""
    return getattr(type(task), "reply", Task.reply) is not Task.reply


def score(task: Task, example: int, answer: str) -> tuple[float, dict[str, float]]:
    """`task.reward` as (reward, metrics), whichever of its two forms it takes.

    Raises TaskError when it returns neither, or a reward that is no finite number.
    """
    value = task.reward(example, answer)
    reward, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise TaskError(f"the reward of example {example} is {reward!r}; it must be a finite number")
    if not isinstance(metrics, Mapping) or not all(isinstance(number, Real) for number in metrics.values()):
        raise TaskError(f"the metrics of example {example} are {metrics!r}; they must be a dict of numbers")
    return float(reward), {str(name): float(number) for name, number in metrics.items()}


def reply(task: Task, example: int, messages: list[dict[str, str]]) -> list[dict[str, str]] | None:
    """`task.reply`; None of a task of one turn. Raises TaskError when it is not a list of messages."""
    said = task.reply(example, messages) if takes_turns(task) else None
    if said is not None and not (isinstance(said, list) and all(map(_is_message, said))):
        raise TaskError(f'{said!r} must be None or a list of {{"role": ..., "content": ...}}')
    return said


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean "chain_sum"?`, or what there is, or nothing."""
    known = sorted(known)
    if close := get_close_matches(word, known, n=1):
        return f'; did you mean "{close[0]}"?'
    return f"; there {'are' if len(known) > 1 else 'is'} {', '.join(known)}" if 0 < len(known) <= 20 else ""
