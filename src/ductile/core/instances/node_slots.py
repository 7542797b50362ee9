"""Which slots are on which node, and which number a node gets that joins.

Each node has equally many slots, numbered node by node: with 8 a node, node 1 has slots 8 to 15. On GPUs it has
`deployment.gpus_per_node` times `cluster.slots_per_device`; on CPUs, where there may be any number, the slots of the
placement are shared out, unless `deployment.gpus_per_node` or node groups are given.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeSlots:
    """The numbering of slots over nodes."""

    per_node: int
    max_nodes: int
    """Most nodes that the run can come to have."""

    @property
    def num_slots(self) -> int:
        return self.per_node * self.max_nodes

    def of(self, node: int) -> tuple[int, ...]:
        """Return the slots that the node has, or would have."""
        return tuple(range(node * self.per_node, (node + 1) * self.per_node))

    def node_of(self, slot: int) -> int:
        return slot // self.per_node


@dataclass(frozen=True, slots=True)
class SlotsPerNode:
    """How many slots a node has, on each kind of device."""

    on_gpus: int
    on_cpus: int


def slots_per_node(each_has: int, num_slots: int, num_nodes: int, shared_out: bool) -> SlotsPerNode:
    """Return how many slots each of the nodes has.

    each_has: `deployment.gpus_per_node` times `cluster.slots_per_device`. num_slots: those of the placement.
    shared_out: on CPUs the nodes have equal parts of these.
    """
    return SlotsPerNode(each_has, -(-num_slots // num_nodes) if shared_out else each_has)


def node_number(asked: int | None, taken: Collection[int], max_nodes: int, head: Collection[int] = ()) -> int | str:
    """Return the number of a node that joins, or why it gets none: a sentence without its full stop.

    asked: the number that it wants to have. taken: numbers of nodes that are there. head: the number of the
    orchestrator's own machine, where it is a node.
    """
    if asked is None:
        free = next((number for number in range(max_nodes) if number not in taken and number not in head), None)
        if free is None:
            return f"the run has all nodes that it may have: {max_nodes} (cluster.max_nodes, cluster.num_nodes)"
        return free
    if not 0 <= asked < max_nodes:
        most = f"{max_nodes - 1}, the last of {max_nodes} (cluster.max_nodes, cluster.num_nodes)"
        return f"there is no node {asked}: --node-rank is at most {most}"
    if asked in head:
        return f"node {asked} is the orchestrator's own machine: join with another --node-rank, or without it"
    if asked in taken:
        return f"node {asked} is there already: join with another --node-rank, or without it"
    return asked


def number_all(asked: Sequence[int | None], first: int, num_nodes: int) -> list[int | None] | None:
    """Return the numbers of the nodes that a run begins with, in the order of their arrival; None while some are
    missing. Those that ask for a number have it, the others get those that are left; None for one that is left over.

    asked: numbers that have been found to be free, or None. first: the lowest number.
    """
    left = iter([number for number in range(first, num_nodes) if number not in asked])
    numbers = [next(left, None) if number is None else number for number in asked]
    return numbers if {*range(first, num_nodes)} <= {*numbers} else None
