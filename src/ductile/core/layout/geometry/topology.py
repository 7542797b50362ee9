"""Which slots are on the same node, and how fast links are: `Topology`, the one record that everybody goes by.

    topology = Topology.of(slots_per_node=8, num_nodes=2)
    topology.node(9)                       1
    topology.spans((6, 7, 8))              True: a group of these talks over the network
    topology.whole_nodes(range(6, 16))     (1,)

Speeds choose between plans, layouts and decisions; that one of them is right never depends on them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

KIB = 1 << 10
MIB = 1 << 20
NODE_BYTES_S = 200e9
"""NVLink of an H100 moves 450e9 each way, of which NCCL reaches about half in FSDP2's sizes."""
NETWORK_BYTES_S = 50e9
"""A network card of 400 Gb/s for each GPU."""


@dataclass(frozen=True)
class Topology:
    """The nodes that slots are on, and the speed of links inside a node and between nodes."""

    nodes: tuple[tuple[int, ...], ...] = ()
    """Slots of each node; empty when all slots share one. A slot of none of them is a node of its own."""
    node_bytes_s: float = NODE_BYTES_S
    """Bytes that a slot sends, and at the same time receives, per second inside its node."""
    network_bytes_s: float = NETWORK_BYTES_S
    """Bytes that a slot sends, and at the same time receives, per second across nodes."""
    round_s: float = 50e-6
    """Seconds that a round takes besides its bytes."""

    @staticmethod
    def of(
        slots_per_node: int,
        num_nodes: int,
        node_bytes_s: float = NODE_BYTES_S,
        network_bytes_s: float = NETWORK_BYTES_S,
    ) -> "Topology":
        """Return the topology of nodes with equally many slots, which are numbered node by node; of one node, that in
        which all slots share one."""
        if num_nodes <= 1:
            return ONE_NODE
        firsts = range(0, slots_per_node * num_nodes, slots_per_node)
        nodes = tuple(tuple(range(first, first + slots_per_node)) for first in firsts)
        return Topology(nodes, node_bytes_s, network_bytes_s)

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "Topology":
        """The inverse of `dataclasses.asdict`."""
        own: dict[str, Any] = dict(fields)
        own["nodes"] = tuple(tuple(slots) for slots in own["nodes"])
        return Topology(**own)

    @property
    def speeds(self) -> str:
        """Speeds of the links that there are, in words."""
        near = f"{self.node_bytes_s / 1e9:g} GB/s"
        return f"{near} inside a node and {self.network_bytes_s / 1e9:g} GB/s across" if self.nodes else near

    @property
    def slots_per_node(self) -> int | None:
        """Slots of the node with the fewest; None where no group can be kept inside one, as all slots share a node or
        each has its own."""
        fewest = min(map(len, self.nodes), default=1)
        return fewest if fewest > 1 else None

    def node(self, slot: int) -> int:
        """Number of the slot's node: equal numbers mean the same node."""
        return self._node_of.get(slot, -1 - slot) if self.nodes else 0

    def by_node(self, slots: Iterable[int]) -> dict[int, list[int]]:
        """Return these slots by their nodes, both in the order in which they come."""
        found: dict[int, list[int]] = {}
        for slot in slots:
            found.setdefault(self.node(slot), []).append(slot)
        return found

    def spans(self, slots: Iterable[int]) -> bool:
        """Return whether these slots are on several nodes."""
        return bool(self.nodes) and len({self.node(slot) for slot in slots}) > 1

    def whole_nodes(self, slots: Collection[int]) -> tuple[int, ...]:
        """Return the nodes of which all slots are among these."""
        among = {*slots}
        return tuple(node for node, own in enumerate(self.nodes) if among.issuperset(own))

    @cached_property
    def _node_of(self) -> dict[int, int]:
        return {slot: index for index, slots in enumerate(self.nodes) for slot in slots}


ONE_NODE = Topology()
"""All slots share a node."""
