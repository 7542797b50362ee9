"""Plan how a state gets from one layout to another.

1. Refine: cut both layouts into cells, and put cells with the same holders and needers on one line (`cells`).
2. A slot keeps what it has and needs. The rest comes from the same machine where a slot there has it, else from the
   least loaded holders (`balance`).
3. Where several slots need the same bytes and holders are the bottleneck, receivers pass on what they got (`flows`).
   That happens only if it lowers the predicted time.
4. Put the flows into rounds within the staging bound (`rounds`).

A plan depends on the two layouts, the topology and the bound, and on nothing else: every slot makes the same one for
itself, in integers, and compares `Plan.key` with the others. The tests hold that every needed element is written
exactly once by a slot that has it, that wire bytes equal the lower bound, and that no slot stages more than the bound.
"""

from hashlib import blake2b

from ductile.core.layout.geometry.layout import Layout
from ductile.core.layout.geometry.topology import MIB, Topology
from ductile.core.transfer.balance import level
from ductile.core.transfer.cells import Refinement, Refiner
from ductile.core.transfer.flows import Flow, demands, flows
from ductile.core.transfer.plan import Plan, busiest_links_s
from ductile.core.transfer.rounds import schedule

WORTH_A_HOP = 0.95
"""Relays are used when they bring the predicted time below this share of the time without them."""

REMEMBERED_PLANS = 32
"""Most plans that a planner remembers; the least recently used one goes first."""


class Planner:
    """Makes plans, and remembers them by the content of what they were made from."""

    def __init__(self, topology: Topology | None = None, round_bytes: int = 16 * MIB, relays: bool = True) -> None:
        """Without `relays` every byte comes from a slot of the source, as carriers need whose receivers read for
        themselves."""
        self.topology = topology or Topology()
        self.round_bytes = round_bytes
        self.relays = relays
        self._refiner = Refiner()
        self._plans: dict[bytes, Plan] = {}

    def plan(self, source: Layout, target: Layout) -> Plan:
        """Raises `NotReshardable` when the target needs something that no slot of the source has."""
        key = self.key(source, target)
        plan = self._plans.pop(key, None) or self._make(source, target)
        self._plans[key] = plan
        if len(self._plans) > REMEMBERED_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan

    def forget_plans(self) -> None:
        """Forget all plans. What is known of classes stays."""
        self._plans.clear()

    def key(self, source: Layout, target: Layout) -> bytes:
        settings = repr((self.topology, self.round_bytes, self.relays)).encode()
        return blake2b(source.key + target.key + settings, digest_size=16).digest()

    def _make(self, source: Layout, target: Layout) -> Plan:
        refinement = self._refiner.refine(source, target)
        slots = tuple(sorted({*source.slots, *target.slots}))
        chosen, reason = self._route(refinement, slots)
        timings, num_rounds = schedule(chosen, self.round_bytes)
        return Plan(
            source,
            target,
            self.topology,
            refinement,
            tuple(chosen),
            tuple(timings),
            num_rounds,
            self.round_bytes,
            reason,
        )

    def _route(self, refinement: Refinement, slots: tuple[int, ...]) -> tuple[list[Flow], str]:
        direct = self._flows(refinement, slots, relay=False)
        if not self.relays:
            return direct, "no relays: receivers read what the slots of the source hold"
        if all(len(line.needers) == 1 for line in refinement.lines):
            return direct, "every byte has one taker: it goes there directly"
        sending_s, receiving_s = busiest_links_s(direct, self.topology)
        moving = sum(line.num_bytes * len(line.needers) for line in refinement.lines)
        few_repeats = self._repeated_bytes(refinement) <= (1 - WORTH_A_HOP) * moving
        if few_repeats and sending_s <= receiving_s / WORTH_A_HOP:
            return direct, "no relays: receiving is the bottleneck, and every slot receives each byte once"
        relayed = self._flows(refinement, slots, relay=True)
        hops = max((edge.hop for flow in relayed for edge in flow.edges), default=0)
        slowest = self.topology.network_bytes_s if self.topology.nodes else self.topology.node_bytes_s
        waiting_bytes = hops * min(self.round_bytes, max(flow.num_bytes for flow in relayed))
        direct_s = max(sending_s, receiving_s)
        relayed_s = max(busiest_links_s(relayed, self.topology)) + waiting_bytes / slowest
        figures = f"{relayed_s * 1e3:.2f} ms with relays, {direct_s * 1e3:.2f} ms without"
        if relayed_s < direct_s * WORTH_A_HOP:
            return relayed, f"receivers pass on what they got, in up to {hops + 1} hops: {figures}"
        return direct, f"relays do not pay: {figures}"

    def _repeated_bytes(self, refinement: Refinement) -> int:
        """Bytes that direct flows carry into a machine again, after another slot there received them."""
        found = 0
        for line in refinement.lines:
            if len(line.needers) > 1 and self.topology.nodes:
                having = {self.topology.node(slot) for slot in line.holders}
                far = [node for node in map(self.topology.node, line.needers) if node not in having]
                found += line.num_bytes * (len(far) - len(set(far)))
        return found

    def _flows(self, refinement: Refinement, slots: tuple[int, ...], relay: bool) -> list[Flow]:
        asked = demands(refinement.lines, self.topology, relay)
        return flows(asked, level(asked, slots), grain_bytes=max(1, self.round_bytes // 256))
