"""Which request goes first when there is not room for all: several turns, one order.

A rollout of several turns comes back with every turn, and waits again. The one that has more finished turns goes first:
it is nearer to its end, its group waits for it, and its context is the likeliest to be cached still. Among equals the
one with more siblings already finished goes first (the group is nearer to being whole), then the one that waits
longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that a generator has not begun."""

    id: str
    since_s: float
    num_turns: int = 0
    """Finished turns of its rollout."""
    siblings_finished: int = 0
    """Of its group."""


def ordered(requests: Sequence[Waiting]) -> list[Waiting]:
    """Who goes first comes first. Equal ones keep a stable order, by time and name."""
    return sorted(requests, key=lambda each: (-each.num_turns, -each.siblings_finished, each.since_s, each.id))


def priority(num_turns: int, siblings_finished: int, group_size: int) -> int:
    """The same order as one number for `GenerateRequest.priority`: higher runs first, and a turn outweighs siblings."""
    return num_turns * (group_size + 1) + min(siblings_finished, group_size)
