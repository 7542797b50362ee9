"""Outcomes of a weight update at each server, and who is sent it again.

    committed   it samples from the version
    dead        its process is gone, or another one answers at its address
    stale       it lives, and is left with what it has: it refused, says nothing, or no attempt reached it

A failure that need not come again (the sender's, a digest that differs) is worth another attempt, in a new epoch and
from bucket 0, as long as there are any left. The last of them is for those alone that another server has held up: what
fails each time takes no other with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from ductile.core.instances.instances import InstanceId

Fault = Literal["gone", "restarted", "refused", "silent", "undone", "held_up"]
"""Way in which a server did not commit: its process cannot be reached; it has another incarnation; it said no, and
would again; it answers nothing; it lives and answers, and the update failed all the same; or another one failed that it
was in a group with."""

UpdateOutcome = Literal["committed", "stale", "dead"]

OUTCOME_OF: dict[Fault, UpdateOutcome] = {
    "gone": "dead", "restarted": "dead", "refused": "stale", "silent": "stale", "undone": "stale",
    "held_up": "stale",
}  # fmt: skip


class InstanceOutcome(msgspec.Struct, frozen=True):
    """State of one server in the end."""

    instance: str
    outcome: UpdateOutcome
    reason: str = ""
    """Reason for which it has not committed, a sentence without its full stop."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Reason for which a server did not commit in one attempt."""

    fault: Fault
    reason: str


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """Decision after an attempt: who is sent the version again (nobody: it is over), and how the others end."""

    again: tuple[InstanceId, ...]
    ended: tuple[InstanceOutcome, ...]


def next_attempt(
    committed: tuple[InstanceId, ...], short: Mapping[InstanceId, Shortfall], attempt: int, max_attempts: int
) -> NextAttempt:
    """Decide how to go on after an attempt. attempt: its number, from 1 on."""
    faults = {why.fault for why in short.values()}
    left = max_attempts - attempt
    worth = {"held_up"} if left == 1 and "held_up" in faults else {"undone", "held_up"} if left > 0 else set[str]()
    again = tuple(name for name, why in short.items() if why.fault in worth)
    ended = [InstanceOutcome(name, "committed") for name in committed]
    for name, why in short.items():
        if name not in again:
            tried = f" (in {attempt} attempts)" if why.fault in ("undone", "held_up") and attempt > 1 else ""
            ended.append(InstanceOutcome(name, OUTCOME_OF[why.fault], f"{why.reason.rstrip('.')}{tried}"))
    return NextAttempt(again, tuple(ended))


SupplyVerdict = Literal["go_on", "wait", "fail"]


def lacking(num_healthy: int, min_healthy: int, waited_s: float, patience_s: float) -> SupplyVerdict:
    """Decide whether a run has servers enough: below `min_healthy` it waits for joins, for so long and no longer."""
    if num_healthy >= min_healthy:
        return "go_on"
    return "wait" if waited_s < patience_s else "fail"
