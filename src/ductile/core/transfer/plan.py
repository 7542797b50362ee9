"""A plan: what every slot keeps, sends and receives, in which round. It can be printed, counted and checked.

    plan = Planner().plan(source, target)
    plan.local(slot)     what the slot copies from its old buffers to its new ones
    plan.rounds(slot)    round after round: the messages it sends and receives, each a list of boxes packed end to end
    plan.at_once(slot)   the same without rounds, for carriers that need no staging

A box always lies in one row of the sender's holdings and in one row of the receiver's, so each side finds its own view
with `layout[name].holdings.view(slot, box)` and packs or unpacks it in row-major order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

from ductile.core.layout.geometry.holdings import Box
from ductile.core.layout.geometry.layout import Layout
from ductile.core.layout.geometry.topology import KIB, MIB, Topology
from ductile.core.transfer.cells import Line, Refinement
from ductile.core.transfer.flows import Edge, Flow
from ductile.core.transfer.rounds import Timing, border


class Part(NamedTuple):
    """A box of a tensor."""

    name: str
    box: Box
    relayed: bool = False
    """Whether the sender received the box in an earlier round and reads it from its new buffers; else it reads its old
    ones."""


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """What a slot sends to one peer, or receives from it, in one round."""

    peer: int
    num_bytes: int
    parts: tuple[Part, ...]
    """Boxes of the message, packed end to end in this order, each row-major."""


@dataclass(frozen=True, slots=True)
class Round:
    """One message at most from each slot to each other one."""

    number: int
    sends: tuple[PeerMessage, ...]
    receives: tuple[PeerMessage, ...]


Stretch = tuple[int, int, int, bool]
"""(line, low, high, relayed): bytes low:high of a line, and whether the sender itself receives them in the plan."""

EdgeStretch = tuple[Edge, int, int, int]
"""(edge, line, low, high): bytes low:high of a line that travel along an edge."""


@dataclass(frozen=True, eq=False)
class Plan:
    source: Layout
    target: Layout
    topology: Topology
    refinement: Refinement
    flows: tuple[Flow, ...]
    timings: tuple[Timing, ...]
    num_rounds: int
    round_bytes: int
    reason: str
    """Why the flows take these routes, in a sentence."""

    @property
    def lines(self) -> list[Line]:
        return self.refinement.lines

    @cached_property
    def slots(self) -> tuple[int, ...]:
        return tuple(sorted({*self.source.slots, *self.target.slots}))

    @cached_property
    def key(self) -> bytes:
        """Digest of the plan. All slots must agree on it before the first byte moves."""
        digest = blake2b(self.source.key + self.target.key, digest_size=16)
        for flow, timing in zip(self.flows, self.timings, strict=True):
            digest.update(repr((flow.line, flow.low, flow.high, flow.edges, timing.count)).encode())
            for rounds in timing.rounds:
                digest.update(repr(rounds if isinstance(rounds, range) else tuple(rounds)).encode())
        return digest.digest()

    def local(self, slot: int) -> Iterator[Part]:
        """Boxes that `slot` has and keeps."""
        for line in self.refinement.local:
            if slot in line.holders:
                yield from (Part(*part) for part in line.parts(0, line.num_bytes))

    def unchanged_buffers(self, slot: int) -> set[str]:
        """Buffers whose every element stays where it is: they can be handed on instead of copied."""
        before, after = _contents(self.source, slot), _contents(self.target, slot)
        return {name for name, content in after.items() if before.get(name) == content}

    def rounds(self, slot: int) -> Iterator[Round]:
        """The rounds in which `slot` has something to do, in order. Its peers' messages mirror its own."""
        moves: dict[int, list[EdgeStretch]] = {}
        for flow, timing in zip(self.flows, self.timings, strict=True):
            for edge, rounds in zip(flow.edges, timing.rounds, strict=True):
                if slot in (edge.source, edge.target):
                    for message, number in enumerate(rounds):
                        low, high = border(flow, timing.count, message), border(flow, timing.count, message + 1)
                        moves.setdefault(number, []).append((edge, flow.line, low, high))
        for number, found in sorted(moves.items()):
            yield self._round(slot, number, found)

    def at_once(self, slot: int) -> Round:
        """Everything that `slot` sends and receives, one message a peer, for a plan without relays."""
        flows = ((edge, flow) for flow in self.flows for edge in flow.edges if slot in (edge.source, edge.target))
        return self._round(slot, 0, ((edge, flow.line, flow.low, flow.high) for edge, flow in flows))

    def _round(self, slot: int, number: int, moves: Iterable[EdgeStretch]) -> Round:
        sends: dict[int, list[Stretch]] = {}
        receives: dict[int, list[Stretch]] = {}
        for edge, line, low, high in moves:
            side, peer = (sends, edge.target) if edge.source == slot else (receives, edge.source)
            side.setdefault(peer, []).append((line, low, high, edge.hop > 0))
        return Round(number, self._messages(sends), self._messages(receives))

    def _messages(self, by_peer: dict[int, list[Stretch]]) -> tuple[PeerMessage, ...]:
        return tuple(
            PeerMessage(
                peer,
                sum(high - low for _, low, high, _ in stretches),
                tuple(
                    Part(name, box, relayed)
                    for line, low, high, relayed in stretches
                    for name, box in self.lines[line].parts(low, high)
                ),
            )
            for peer, stretches in sorted(by_peer.items())
        )

    @cached_property
    def egress(self) -> dict[int, int]:
        """Bytes that each slot sends."""
        return self._per_slot(lambda edge: edge.source)

    @cached_property
    def ingress(self) -> dict[int, int]:
        """Bytes that each slot receives."""
        return self._per_slot(lambda edge: edge.target)

    @cached_property
    def kept(self) -> dict[int, int]:
        """Bytes that each slot already has and still needs."""
        found = dict.fromkeys(self.slots, 0)
        for line in self.refinement.local:
            for slot in line.holders:
                found[slot] += line.num_bytes
        return found

    @property
    def wire_bytes(self) -> int:
        return sum(self.ingress.values())

    @cached_property
    def lower_bound_bytes(self) -> int:
        """Bytes that slots need and do not have, added up: no plan can move fewer."""
        needed = sum(
            int((t.holdings.stop - t.holdings.start).prod(axis=1).sum()) * t.item_bytes for t in self.target
        )  # fmt: skip
        return needed - sum(self.kept.values())

    @property
    def relayed_bytes(self) -> int:
        """Wire bytes that leave a slot which received them in this plan."""
        return sum(flow.num_bytes for flow in self.flows for edge in flow.edges if edge.hop)

    @cached_property
    def num_messages(self) -> int:
        return sum(timing.count * len(timing.rounds) for timing in self.timings)

    @cached_property
    def predicted_s(self) -> float:
        """Seconds on the wire by the topology's speeds: the busiest link, and what the rounds cost."""
        return max(busiest_links_s(self.flows, self.topology)) + self.num_rounds * self.topology.round_s

    def _per_slot(self, end: Callable[[Edge], int]) -> dict[int, int]:
        found = dict.fromkeys(self.slots, 0)
        for flow in self.flows:
            for edge in flow.edges:
                found[end(edge)] += flow.num_bytes
        return found

    def __str__(self) -> str:
        tensors, whole = len(self.target.tensors), sum(tensor.num_bytes for tensor in self.target)
        unit, name = self._unit
        lines = [
            f"plan {self.key.hex()[:8]}: {tensors} tensors in {self.refinement.num_classes} classes, "
            f"{whole / unit:.1f} {name}, {len(self.source.slots)} slots to {len(self.target.slots)}",
            f"  wire {self.wire_bytes / unit:.1f} {name} (lower bound {self.lower_bound_bytes / unit:.1f}), relayed "
            f"{self.relayed_bytes / unit:.1f}, kept in place {sum(self.kept.values()) / unit:.1f}",
            f"  {len(self.flows)} flows, {self.num_messages} messages, {self.num_rounds} "
            f"{'round' if self.num_rounds == 1 else 'rounds'} of at most "
            f"{self.round_bytes / MIB:g} MiB each way, predicted {self.predicted_s * 1e3:.2f} ms at "
            f"{self.topology.speeds}",
            f"  {self.reason}",
            f"  slot      keeps      sends   receives   {name}",
        ]
        for slot in self.slots:
            row = (self.kept[slot], self.egress[slot], self.ingress[slot])
            lines.append(f"  {slot:4d} " + " ".join(f"{amount / unit:10.1f}" for amount in row))
        return "\n".join(lines)

    def describe_flows(self, limit: int = 20) -> str:
        """The largest flows, one a line: `0 -> 2 -> 4, 6   161.7 MiB`."""
        unit, name = self._unit
        largest = sorted(self.flows, key=lambda flow: -flow.num_bytes)[:limit]
        return "\n".join(f"  {_route(flow.edges):40} {flow.num_bytes / unit:10.1f} {name}" for flow in largest)

    @property
    def _unit(self) -> tuple[int, str]:
        """Unit in which amounts are printed, and its name: in MiB, a plan of a few KiB would be one of 0.0."""
        return (MIB, "MiB") if sum(tensor.num_bytes for tensor in self.target) >= MIB else (KIB, "KiB")


def busiest_links_s(flows: Sequence[Flow], topology: Topology) -> tuple[float, float]:
    """The longest time that any slot sends on one kind of link, and that any one receives."""
    sent: dict[tuple[int, bool], int] = {}
    received: dict[tuple[int, bool], int] = {}
    for flow in flows:
        for edge in flow.edges:
            near = topology.node(edge.source) == topology.node(edge.target)
            sent[edge.source, near] = sent.get((edge.source, near), 0) + flow.num_bytes
            received[edge.target, near] = received.get((edge.target, near), 0) + flow.num_bytes
    speed = {True: topology.node_bytes_s, False: topology.network_bytes_s}
    longest = [
        max((amount / speed[near] for (_, near), amount in side.items()), default=0.0) for side in (sent, received)
    ]
    return longest[0], longest[1]


def _contents(layout: Layout, slot: int) -> dict[str, list[object]]:
    """What lies where in each buffer of a slot, and how long the buffer is."""
    found: dict[str, list[object]] = {name: [size] for name, size in layout.buffer_sizes(slot).items()}
    for tensor in layout:
        for start, stop, offset, strides, buffer in tensor.holdings.rows_of(slot):
            found[tensor.buffer(buffer)].append((tensor.name, start, stop, offset, strides))
    return found


def _route(edges: Sequence[Edge]) -> str:
    first = edges[0]
    text = f"{first.source} -> {first.target}"
    if len(edges) > 1:
        text += " -> " + ", ".join(
            str(edge.target) if edge.source == first.target else f"{edge.source}:{edge.target}" for edge in edges[1:]
        )
    return text
