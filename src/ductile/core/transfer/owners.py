"""Who owns an element of a tensor, among the slots that hold it: the owner writes it, and counts it in a norm.

    slots 0, 1   rows 0:4, both            slot 0 owns rows 0:4
    slots 2, 3   rows 4:8, both            slot 3 owns rows 4:8

Every element has exactly one owner, and what has several holders is dealt out among them in turns. All slots come to
the same owners, as these follow from the holdings alone.
"""

from ductile.core.layout.geometry.holdings import Box, volume
from ductile.core.transfer.cells import Atoms

LEAST_SHARED = 1 << 16
"""Least elements that several holders cut up to share. Less is one holder's, as with `owned_boxes`."""


def owned_boxes(disjoint: Atoms, slot: int, turn: int = 0) -> list[Box]:
    """The boxes that a slot owns, each inside one of its own. `turn` is the place of the first one's owner among its
    holders: with another turn for each tensor, copies of a state own equally many tensors."""
    boxes = zip(disjoint.start.tolist(), disjoint.stop.tolist(), disjoint.slots, strict=True)
    return [
        (tuple(start), tuple(stop))
        for number, (start, stop, holders) in enumerate(boxes, start=turn)
        if holders[number % len(holders)] == slot
    ]


def shared_boxes(disjoint: Atoms, slot: int, turn: int = 0) -> list[Box]:
    """The boxes that a slot sends where each element is sent once, and all holders as much. What several hold is cut
    along its first dim, for each to send its part; `turn` is as in `owned_boxes`."""
    boxes = zip(disjoint.start.tolist(), disjoint.stop.tolist(), disjoint.slots, strict=True)
    ours: list[Box] = []
    for number, (start, stop, holders) in enumerate(boxes, start=turn):
        if slot not in holders:
            continue
        num_parts = len(holders) if volume((start, stop)) >= LEAST_SHARED else 1
        part = (holders.index(slot) - number) % len(holders)
        low, high = ((stop[0] - start[0]) * min(at, num_parts) // num_parts + start[0] for at in (part, part + 1))
        if low < high:
            ours.append(((low, *start[1:]), (high, *stop[1:])))
    return ours
