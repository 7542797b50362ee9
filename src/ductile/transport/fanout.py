"""One command to each of several slots, and one outcome from each.

If any outcome is bad, the worst is raised, with the others in its notes: a lost slot before a refusal before lateness,
as the later ones usually follow from it. Of refusals, one that may be asked again comes last, and a slot without memory
first: the others' collective has failed because of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ductile.messages.workers import Command, Reply
from ductile.roles import Failure, Late, OutOfMemory, Refused, SlotLost
from ductile.transport.mailbox import Mailbox, Outcome

AFTER_FAILURE_S = 2.0
"""Seconds that slots have to say why they fail when another of their collective has failed: none can succeed."""

R = TypeVar("R", bound=Reply)
K = TypeVar("K")


async def ask_each(
    mailbox: Mailbox, commands: Mapping[int, Command], timeout_s: float, expected: type[R]
) -> dict[int, R]:
    """All slots' replies, which are of the class `expected`. Raises SlotLost, Refused or Late: the worst outcome."""
    outcomes = await mailbox.ask_all(commands, timeout_s, AFTER_FAILURE_S)
    return replies_of(mailbox.describe, commands, outcomes, expected)


async def ask_in_step(mailbox: Mailbox, slots: Sequence[int], command: Command, timeout_s: float) -> Reply:
    """Have slots do one thing together; the first one's reply is that of all. Raises SlotLost, Refused or Late: the
    worst outcome."""
    if len(slots) == 1:
        return await mailbox.ask(slots[0], command, timeout_s)
    outcomes = await mailbox.ask_all(dict.fromkeys(slots, command), timeout_s, AFTER_FAILURE_S)
    raise_worst(outcomes)
    first = outcomes[slots[0]]
    assert not isinstance(first, Failure), "the worst failure has been raised"
    return first


def replies_of(
    describe: Callable[[K], str], commands: Mapping[K, Command], outcomes: Mapping[K, Outcome], expected: type[R]
) -> dict[K, R]:
    """The replies, which are of the class `expected`. Raises SlotLost, Refused or Late: the worst one.

    describe: who was asked, in words.
    """
    raise_worst(outcomes)
    replies: dict[K, R] = {}
    for asked, outcome in outcomes.items():
        if not isinstance(outcome, expected):
            command = type(commands[asked]).__name__
            raise Refused(f"{describe(asked)} replied to {command} with {type(outcome).__name__}")
        replies[asked] = outcome
    return replies


def raise_worst(outcomes: Mapping[Any, Outcome]) -> None:
    if worst := worst_of(outcomes.values()):
        for other in outcomes.values():
            if isinstance(other, Failure) and other is not worst:
                worst.add_note(str(other))
        raise worst


def worst_of(outcomes: Iterable[Outcome]) -> Failure | None:
    """The failure that the others are likely to follow from; None where there is none."""
    return min((outcome for outcome in outcomes if isinstance(outcome, Failure)), key=_rank, default=None)


def _rank(failure: Failure) -> tuple[int, bool, bool]:
    kinds = (SlotLost, Refused, Late)
    place = next((place for place, kind in enumerate(kinds) if isinstance(failure, kind)), len(kinds))
    return place, failure.retryable, not isinstance(failure, OutOfMemory)
