"""Turn levelled shares into flows: which stretch of a line goes from which slot to which, and on.

    direct        0 -> 4
    striped       0 -> 2 -> {4, 6}    0 sends a third to each of 2, 4, 6, and each passes its third on to the others
    machines      0 -> 8 -> 16, 8 -> {9, 10}, 16 -> {17, 18}    into each machine once, then round inside it

A relay forwards only what it needs itself, so nothing is sent that its receiver does not need.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ductile.core.layout.geometry.topology import Topology
from ductile.core.transfer.balance import Demand, Share
from ductile.core.transfer.cells import Line, Slots

ALIGN = 8
"""Stretches begin and end at multiples of so many bytes, which never cuts an item in two (see `Line`)."""
STRIPES = 16
"""Most stripes of a demand. With more receivers a stripe travels down a tree, so that no slot has more than 16
neighbours each way."""
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Edge:
    source: int
    target: int
    hop: int
    """Hops of the bytes before this edge: 0 from a holder, h + 1 from a slot that received them at hop h."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes low:high of a line, and the tree along which they travel; an edge comes after the one that feeds it."""

    line: int
    low: int
    high: int
    edges: tuple[Edge, ...]

    @property
    def num_bytes(self) -> int:
        return self.high - self.low


def demands(lines: Sequence[Line], topology: Topology, relay: bool) -> list[Demand]:
    """Which slots ask which holders: slots with a holder on their machine ask there, the others ask all holders."""
    found: list[Demand] = []
    for index, line in enumerate(lines):
        inside: dict[int, list[int]] = {}
        for slot in line.holders:
            inside.setdefault(topology.node(slot), []).append(slot)
        asking: dict[int, list[int]] = {}
        for slot in line.needers:
            asking.setdefault(topology.node(slot), []).append(slot)
        for node in asking.keys() & inside.keys():
            found.append(
                Demand(index, 0, line.num_bytes, tuple(inside[node]), tuple(asking[node]), network=False, relay=relay)
            )
        far = [tuple(slots) for node, slots in asking.items() if node not in inside]
        if far and relay:
            found += _machines(index, line, far)
        elif far:
            everybody = tuple(slot for slots in far for slot in slots)
            found.append(Demand(index, 0, line.num_bytes, line.holders, everybody, network=True))
    return found


def _machines(index: int, line: Line, machines: list[Slots]) -> Iterator[Demand]:
    """Demands by which each machine receives every byte once: its slots take turns as the entrance, and spread the
    bytes inside."""
    turns = max(len(slots) for slots in machines)
    borders = [line.num_bytes * turn // turns // ALIGN * ALIGN for turn in range(turns)] + [line.num_bytes]
    for turn in range(turns):
        if borders[turn] < borders[turn + 1]:
            entrances = tuple(slots[turn % len(slots)] for slots in machines)
            fan_out = tuple(
                (entrance, tuple(slot for slot in slots if slot != entrance))
                for entrance, slots in zip(entrances, machines, strict=True)
                if len(slots) > 1
            )
            low, high = borders[turn], borders[turn + 1]
            yield Demand(index, low, high, line.holders, entrances, network=True, relay=True, fan_out=fan_out)


def flows(asked: Sequence[Demand], shares: Sequence[Share], grain_bytes: int) -> list[Flow]:
    """The flows that serve these demands. Shares below `grain_bytes` are not worth a message of their own; the largest
    sender of the demand takes them."""
    found: list[Flow] = []
    for demand, share in zip(asked, shares, strict=True):
        holders = _coarse(share.holders.tolist(), grain_bytes)
        stretches = list(_stretches(demand, _coarse(share.relays.tolist(), grain_bytes)))
        found += _serve(demand, stretches, holders)
    return found


def _coarse(amounts: list[int], grain_bytes: int) -> list[int]:
    small = [amount if amount < grain_bytes else 0 for amount in amounts]
    kept = [amount - less for amount, less in zip(amounts, small, strict=True)]
    kept[amounts.index(max(amounts))] += sum(small)
    return kept


def _stretches(demand: Demand, relays: list[int]) -> Iterator[tuple[int, int, tuple[Edge, ...]]]:
    """(low, high, edges after the first). The first edge leads to the source of the second, or to the only receiver.

    Every stripe has its own inner slots, so each slot passes on one stripe and only receives the others. What no relay
    takes goes to each needer directly.
    """
    position, copies = demand.low, len(demand.needers)
    fan_out = dict(demand.fan_out)
    stripes = min(copies, STRIPES) if sum(relays) else 0
    for stripe in range(stripes):
        inner = list(range(stripe, copies, stripes))
        length = sum(relays[i] for i in inner) // (copies - 1) // ALIGN * ALIGN
        high = min(position + length, demand.high)
        if stripe == stripes - 1 and demand.high - high < ALIGN * copies:
            high = demand.high  # with what rounding left over
        if position < high:
            children = _in_proportion([relays[i] for i in inner], copies - 1)
            inner.sort(key=lambda i: -children[i // stripes])
            leaves = [i for i in range(copies) if i % stripes != stripe]
            slots = [demand.needers[i] for i in (*inner, *leaves)]
            yield position, high, _tree(slots, sorted(children, reverse=True), fan_out)
        position = high
    if position < demand.high:
        for slot in demand.needers:
            yield position, demand.high, _tree([slot], [0], fan_out)


def _in_proportion(amounts: list[int], count: int) -> list[int]:
    """`count` things shared out by `amounts`, the largest remainders first."""
    total = sum(amounts) or 1
    shares = [amount * count // total for amount in amounts]
    order = sorted(range(len(amounts)), key=lambda i: (-(amounts[i] * count % total), i))
    for index in range(count - sum(shares)):
        shares[order[index % len(order)]] += 1
    return shares


def _tree(slots: Sequence[int], children: Sequence[int], fan_out: dict[int, Slots]) -> tuple[Edge, ...]:
    """Edges of a tree, breadth first: the first slot passes on to the next `children[0]` ones, the second one to those
    after, and so on.

    Begins with an edge from nowhere to the first slot. `children` falls, so a slot that has some has been reached
    before.
    """
    hops = {slots[0]: 0}
    edges = [Edge(NOWHERE, slots[0], 0)]
    reached = 1
    for slot, count in zip(slots, children, strict=False):
        for other in slots[reached : reached + count]:
            hops[other] = hops[slot] + 1
            edges.append(Edge(slot, other, hops[other]))
        reached += count
    for slot, hop in hops.items():
        edges += [Edge(slot, other, hop + 1) for other in fan_out.get(slot, ())]
    return tuple(edges)


def _serve(demand: Demand, stretches: list[tuple[int, int, tuple[Edge, ...]]], amounts: list[int]) -> Iterator[Flow]:
    """Lay the stretches end to end and cut them where one holder's amount ends and the next one's begins.

    So a needer has few senders, although each holder gives exactly its share.
    """
    holders = [(slot, amount) for slot, amount in zip(demand.holders, amounts, strict=True) if amount]
    turn, left = 0, holders[0][1]
    for low, high, edges in stretches:
        while low < high:
            last = turn == len(holders) - 1
            middle = high if last else min(high, (low + left + ALIGN - 1) // ALIGN * ALIGN)
            if high - middle < ALIGN:
                middle = high
            first = Edge(holders[turn][0], edges[0].target, 0)
            yield Flow(demand.line, low, middle, (first, *edges[1:]))
            left -= middle - low
            low = middle
            while left <= 0 and turn < len(holders) - 1:
                turn += 1
                left += holders[turn][1]
