"""One command to each of several slots, and one outcome from each.

If any outcome is bad, the worst is raised: a lost slot before a refusal before lateness, as the later ones usually
follow from it; they are in its notes.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from ductile.roles import Late, Refused, SlotLost
from ductile.wire.mailbox import Mailbox, Outcome
from ductile.wire.messages import AssignRole, Command, Done, Reply, RoleName

AFTER_FAILURE_S = 2.0
"""Once one slot failed, the others of a collective cannot succeed; they get this long to say why."""

R = TypeVar("R", bound=Reply)


async def ask_each(
    mailbox: Mailbox, commands: Mapping[int, Command], timeout_s: float, expected: type[R]
) -> dict[int, R]:
    """All slots' replies, which are of the class `expected`. Raises SlotLost, Refused or Late: the worst outcome."""
    return replies_of(mailbox, commands, await mailbox.ask_all(commands, timeout_s, AFTER_FAILURE_S), expected)


async def assign_role(
    mailbox: Mailbox,
    role: RoleName,
    settings: Mapping[str, object],
    slots: Sequence[int],
    timeout_s: float,
    rendezvous: str = "",
) -> None:
    """Give the slots their role. With `rendezvous` they hold it together, in this order; else each by itself."""
    commands = {
        slot: AssignRole(role, dict(settings), tuple(slots) if rendezvous else (slot,), rendezvous) for slot in slots
    }
    await ask_each(mailbox, commands, timeout_s, Done)


def replies_of(
    mailbox: Mailbox, commands: Mapping[int, Command], outcomes: Mapping[int, Outcome], expected: type[R]
) -> dict[int, R]:
    """The replies, which are of the class `expected`. Raises SlotLost, Refused or Late: the worst one."""
    raise_worst(outcomes)
    replies: dict[int, R] = {}
    for slot, outcome in outcomes.items():
        if not isinstance(outcome, expected):
            command = type(commands[slot]).__name__
            raise Refused(f"{mailbox.describe(slot)} replied to {command} with {type(outcome).__name__}")
        replies[slot] = outcome
    return replies


def raise_worst(outcomes: Mapping[int, Outcome]) -> None:
    for kind in (SlotLost, Refused, Late):
        for worst in outcomes.values():
            if isinstance(worst, kind):
                for other in outcomes.values():
                    if isinstance(other, Exception) and other is not worst:
                        worst.add_note(str(other))
                raise worst
