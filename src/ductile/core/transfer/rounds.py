"""Put flows into rounds so that no slot stages more than a bound.

A flow is cut into messages. In a round every slot sends at most `round_bytes` and receives at most `round_bytes`; what
a relay received in one round it may pass on in a later one. Rounds need no barrier: a slot goes to the next one when
its own sends and receives of this one are done. As every message is sent and received in the same round, and all of a
round's operations are posted together, no slot waits for one that waits for it.

1. The number of rounds follows from the busiest slot.
2. Large flows move the same share in every round, so their slots are busy from the first round to the last.
3. Small ones fill the gaps: the largest first, each message in the first round where both ends have room.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ductile.core.transfer.flows import ALIGN, Edge, Flow

MANY = 32
"""A flow is large when a message of it fills at least 1/32 of a round."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Rounds in which a flow's messages travel."""

    count: int
    """Messages of the flow, about equally long."""
    rounds: tuple[Sequence[int], ...]
    """`rounds[edge][message]` is the round in which the message travels along the edge."""


def border(flow: Flow, count: int, message: int) -> int:
    """Offset at which message `message` of `count` begins on the line."""
    if message in (0, count):
        return flow.high if message else flow.low
    return (flow.low + flow.num_bytes * message // count) // ALIGN * ALIGN


def schedule(flows: Sequence[Flow], round_bytes: int) -> tuple[list[Timing], int]:
    """The timing of every flow, and the number of rounds. `round_bytes` is at least 64."""
    if round_bytes < 64:
        raise ValueError(f"round_bytes is {round_bytes}; it must be at least 64")
    num_rounds = _fewest(flows, round_bytes)
    large = [flow.num_bytes * MANY >= round_bytes * num_rounds for flow in flows]
    if round_bytes < 1024 * MANY:
        large = [False] * len(flows)
    room = _Room(round_bytes)
    timings: dict[int, Timing] = {}
    last = -1
    for index, flow in enumerate(flows):
        if large[index]:
            timings[index] = Timing(num_rounds, tuple(range(e.hop, e.hop + num_rounds) for e in flow.edges))
            last = max(last, num_rounds - 1 + max(edge.hop for edge in flow.edges))
            for edge in flow.edges:
                room.steady(edge, flow.num_bytes // num_rounds + 2 * ALIGN)
    room.begin(last + 1)
    longest = max(round_bytes // 8, 32)
    for index in sorted(range(len(flows)), key=lambda i: (-flows[i].num_bytes, i)):
        if not large[index]:
            timings[index] = _fit(flows[index], longest, room)
            last = max(last, *(max(placed) for placed in timings[index].rounds))
    return [timings[index] for index in range(len(flows))], last + 1


def _fewest(flows: Sequence[Flow], round_bytes: int) -> int:
    """How many rounds the busiest slot needs, each with room for what rounding adds to its messages."""
    loads: dict[tuple[bool, int], int] = {}
    for flow in flows:
        for edge in flow.edges:
            loads[True, edge.source] = loads.get((True, edge.source), 0) + flow.num_bytes
            loads[False, edge.target] = loads.get((False, edge.target), 0) + flow.num_bytes
    usable = max(round_bytes - 2 * ALIGN * MANY, round_bytes // 2)
    return max(1, -(-max(loads.values(), default=0) // usable))


def _fit(flow: Flow, longest: int, room: "_Room") -> Timing:
    gap = min(room.beside(edge) for edge in flow.edges)
    if gap >= longest // 2:
        longest = min(longest, gap - ALIGN)
    count = -(-flow.num_bytes // longest)
    rounds: list[list[int]] = [[] for _ in flow.edges]
    for message in range(count):
        size = border(flow, count, message + 1) - border(flow, count, message)
        arrived: dict[int, int] = {}
        for edge, placed in zip(flow.edges, rounds, strict=True):
            earliest = arrived.get(edge.source, -1) + 1
            placed.append(room.take(edge, earliest, size))
            arrived[edge.target] = placed[-1]
    return Timing(count, tuple(rounds))


class _Room:
    """What every slot sends and receives in every round so far: what large flows take steadily, and then the rest."""

    def __init__(self, round_bytes: int) -> None:
        self.round_bytes = round_bytes
        self.taken: dict[tuple[bool, int], int] = {}
        """Bytes that large flows take of a slot's sends (True, slot) or receives (False, slot), in each of the rounds
        that they use."""
        self.free_from = 0
        """The first round without large flows."""
        self.used: dict[tuple[bool, int], list[int]] = {}
        self.full: dict[tuple[bool, int], int] = {}
        """First round of a slot's sends or receives that may have room: all rounds before it are as good as full."""

    def steady(self, edge: Edge, num_bytes: int) -> None:
        for end in ((True, edge.source), (False, edge.target)):
            self.taken[end] = self.taken.get(end, 0) + num_bytes

    def begin(self, free_from: int) -> None:
        self.free_from = free_from
        for end, amount in self.taken.items():
            self.used[end] = [amount] * free_from

    def beside(self, edge: Edge) -> int:
        """Bytes a round that large flows leave to this edge."""
        taken = max(self.taken.get((True, edge.source), 0), self.taken.get((False, edge.target), 0))
        return self.round_bytes - taken

    def take(self, edge: Edge, earliest: int, num_bytes: int) -> int:
        """The first round from `earliest` on in which both ends have room for so many bytes, which are then taken."""
        out, into = (True, edge.source), (False, edge.target)
        number = max(earliest, self.full.get(out, 0), self.full.get(into, 0))
        if num_bytes > self.beside(edge):
            number = max(number, self.free_from)
        limit = self.round_bytes - num_bytes
        sent, received = self._upto(out, number + 1), self._upto(into, number + 1)
        while sent[number] > limit or received[number] > limit:
            number += 1
            if number == len(sent):
                sent.append(0)
            if number == len(received):
                received.append(0)
        sent[number] += num_bytes
        received[number] += num_bytes
        for end, used in ((out, sent), (into, received)):
            first = self.full.get(end, 0)
            while first < len(used) and used[first] * 64 > self.round_bytes * 63:
                first += 1
            self.full[end] = first
        return number

    def _upto(self, end: tuple[bool, int], length: int) -> list[int]:
        used = self.used.setdefault(end, [])
        if len(used) < length:
            used.extend([0] * (length - len(used)))
        return used
