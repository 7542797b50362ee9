"""What is common to all tasks: their error, and how their completions are read.

The protocol itself is `ductile.roles.Task`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar, cast

from ductile.config.checks.reward_signature import FACTS, RewardSignature, WrongSignature, reward_signature
from ductile.config.reading import errors
from ductile.error_text import error_with_place
from ductile.records import Completion
from ductile.roles import Task
from ductile.tasks.messages import BadMessage, TemplateMessage, for_template
from ductile.user_numbers import as_finite, as_number

T = TypeVar("T")


class TaskError(Exception):
    """A task that cannot be made or used. The text is a sentence: what is wrong, where, and what to write instead."""


def takes_turns(task: Task) -> bool:
    """Whether the environment may speak again after the policy did. A task of one turn need not define `reply`."""
    return getattr(type(task), "reply", Task.reply) is not Task.reply


async def _awaited(value: Awaitable[T]) -> T:
    return await value


def score(
    task: Task, example: int, completion: Completion, run: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run
) -> tuple[float, dict[str, float | None]]:
    """`task.reward` as (reward, metrics), whichever of its forms it takes. run: waits for what an async one returns.

    A metric that is no finite number, such as a precision of 0/0, is None: the reward is good all the same. Raises
    TaskError when it returns neither, or a reward that is no finite number; the text goes on after "the reward of
    example 3".
    """
    value: Any = task.reward(example, completion.text, **_asked_for(task, completion))
    value = run(_awaited(value)) if isinstance(value, Awaitable) else value
    reward, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    number = as_finite(reward)
    if number is None:
        raise TaskError(f"returned {reward!r}; it must return a finite number")
    return number, {name: as_finite(value) for name, value in metrics_of(metrics).items()}


def metrics_of(metrics: object) -> dict[str, object]:
    """Return what a reward reports besides: numbers by their names, without those that are None, which this completion
    does not have. Raises TaskError, whose text goes on after "the
    reward of example 3"."""
    if not isinstance(metrics, Mapping) or any(
        as_number(value) is None for value in metrics.values() if value is not None
    ):
        raise TaskError(f"returned the metrics {metrics!r}; they must be a dict of numbers")
    named = {str(name).strip(): value for name, value in metrics.items()}
    if len(named) < len(metrics) or "" in named:
        raise TaskError(f"returned the metrics {metrics!r}; each must have a name of its own")
    return {name: value for name, value in named.items() if value is not None}


def _asked_for(task: Task, completion: Completion) -> dict[str, Any]:
    """The facts that the reward asks for by name."""
    signature = signature_of(task)
    facts = {name: getattr(completion, name) for name in FACTS if signature.wants(name)}
    return facts | ({"token_ids": tuple(facts["token_ids"])} if "token_ids" in facts else {})


def signature_of(task: Task) -> RewardSignature:
    """The signature of the task's `reward`. Raises TaskError when it cannot be called."""
    try:
        return reward_signature(task.reward, first="example")
    except WrongSignature as error:
        raise TaskError(f"the method `reward` of {type(task).__name__} {error}") from None


def messages_of(task: Task, example: int) -> list[TemplateMessage]:
    """Return `task.messages` as chat templates take them. Raises TaskError when it raises, or returns what is no
    conversation."""
    where = f"{type(task).__name__}.messages({example})"
    try:
        said: object = task.messages(example)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"{where} raised {error_with_place(error)}") from error
    if not (isinstance(said, list) and said and all(isinstance(message, Mapping) for message in cast(list[Any], said))):
        raise TaskError(f'{where} returned {said!r:.80}; it must return a list of {{"role": ..., "content": ...}}')
    messages = list[TemplateMessage]()
    for number, message in enumerate(cast(list[TemplateMessage], said), 1):
        try:
            messages.append(for_template(message))
        except BadMessage as error:
            raise TaskError(f"{where}: message {number} {error}") from None
    return messages


def reply(task: Task, example: int, messages: list[dict[str, str]]) -> list[dict[str, str]] | None:
    """`task.reply`; None of a task of one turn. Raises TaskError when it is not a list of messages."""
    said = task.reply(example, messages) if takes_turns(task) else None
    if said is not None and not (isinstance(said, list) and all(map(_is_message, said))):
        raise TaskError(f'returned {said!r}; it must return None or a list of {{"role": ..., "content": ...}}')
    return said


def variables_of(task: Task, example: int) -> Mapping[str, Any]:
    """Return `task.template_variables`, which a task need not define."""
    return getattr(type(task), "template_variables", Task.template_variables)(task, example)


def source_of(task: Task, example: int) -> str:
    """Return `task.source`, which a task need not define."""
    return getattr(type(task), "source", Task.source)(task, example)


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean "chain_sum"?`, or what there is, or nothing."""
    known = sorted(known)
    if suggestion := errors.did_you_mean(word, known, '; did you mean "{}"?'):
        return suggestion
    return f"; there {'are' if len(known) > 1 else 'is'} {', '.join(known)}" if 0 < len(known) <= 20 else ""
