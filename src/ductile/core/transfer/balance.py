"""Which slot sends how much: level the loads of the slots that can.

A demand is a stretch of a line, the slots that can send it, the slots that need it. Without relays, each of the V bytes
leaves a holder D times. With relays it leaves holders at least once, and slots that received it may pass it on.

1. Demands with the fewest holders first, then the largest.
2. Each is spread over its senders like water: the lowest rise first, to one level.
3. Take each demand out again and pour it anew against the others' final levels. Levelling is a convex problem whose
   demands are independent of each other, so a few such sweeps come to rest at the optimum.

All amounts are integers, so that every slot comes to the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ductile.core.layout.geometry.holdings import Ints
from ductile.core.transfer.cells import Slots

SWEEPS = 8
"""Most levelling sweeps. Random problems are within 1% of the optimum after so many; most come to rest after two or
three."""


@dataclass(frozen=True)
class Demand:
    line: int
    low: int
    high: int
    """End of the bytes low:high of the line that are asked for."""
    holders: Slots
    needers: Slots
    network: bool
    """Whether the bytes cross machines: links inside machines and links across them are levelled separately."""
    relay: bool = False
    """Whether needers may pass the bytes on to one another."""
    fan_out: tuple[tuple[int, Slots], ...] = ()
    """(needer, other slots of its machine): the needer passes all bytes on to these slots after receiving them."""

    @property
    def num_bytes(self) -> int:
        return self.high - self.low


@dataclass(frozen=True)
class Share:
    """How one demand is served: bytes out of each holder, and out of each needer that passes on."""

    holders: Ints
    relays: Ints


def level(demands: Sequence[Demand], slots: Slots) -> list[Share]:
    """The share of every demand, levelled over all of them."""
    at = {slot: place for place, slot in enumerate(slots)}
    # Bytes that every slot sends, [slots], inside its machine and across machines.
    inside, network = np.zeros(len(at), dtype=np.int64), np.zeros(len(at), dtype=np.int64)
    for demand in demands:
        for slot, others in demand.fan_out:
            inside[at[slot]] += len(others) * demand.num_bytes
    order = sorted(
        range(len(demands)), key=lambda i: (len(demands[i].holders), -demands[i].num_bytes, demands[i].holders, i)
    )
    places = [(np.array([at[s] for s in d.holders]), np.array([at[s] for s in d.needers])) for d in demands]
    shares: list[Share | None] = [None] * len(demands)
    choices = order
    highest = -1
    for _ in range(SWEEPS):
        for index in choices:
            demand, (holders, needers) = demands[index], places[index]
            load = network if demand.network else inside
            share = shares[index]
            if share is not None:
                load[holders] -= share.holders
                load[needers] -= share.relays
            share = shares[index] = _pour(demand, load[holders], load[needers])
            load[holders] += share.holders
            load[needers] += share.relays
        before, highest = highest, int(inside.max(initial=0)) + int(network.max(initial=0))
        choices = [i for i in order if len(demands[i].holders) > 1 or _passes_on(demands[i])]
        if not choices or (before >= 0 and highest >= before - before // 512):
            break
    return [share for share in shares if share is not None]


def _passes_on(demand: Demand) -> bool:
    return demand.relay and len(demand.needers) > 1


def _pour(demand: Demand, holders: Ints, needers: Ints) -> Share:
    size, copies = demand.num_bytes, len(needers)
    none = np.zeros(copies, dtype=np.int64)
    if not _passes_on(demand):
        return Share(pour(holders, size * copies), none)
    both = pour(np.concatenate([holders, needers]), size * copies)
    share = Share(both[: len(holders)], both[len(holders) :])
    if int(share.relays.sum()) > size * (copies - 1):
        return Share(pour(holders, size), pour(needers, size * (copies - 1)))
    return share


def pour(levels: Ints, amount: int) -> Ints:
    """What to add to each level, `amount` in all, so that the highest of those that get something is lowest.

    `pour([5, 1, 2], 5)` is [0, 3, 2]: both end at 4.
    """
    if len(levels) == 1:
        return np.array([amount], dtype=np.int64)
    order = np.argsort(levels, kind="stable")
    lowest = levels[order]
    totals = np.cumsum(lowest)
    count = np.arange(1, len(levels) + 1)
    reached = (amount + totals) // count
    enough = reached[:-1] <= lowest[1:]
    filled = int(enough.argmax()) + 1 if enough.any() else len(levels)
    surface = int(amount + totals[filled - 1]) // filled
    added = np.zeros(len(levels), dtype=np.int64)
    added[order[:filled]] = surface - lowest[:filled]
    added[order[: amount - int(added.sum())]] += 1
    return added
