"""Order in which slots of several nodes become the ranks of a layout: `arranged`.

The axes of a layout run from the outermost, pp, to the innermost, tp (`parallel_layout`). So slots that lie node by
node put tp inside a node, then cp, then shards, and what is left, copies and stages, across nodes:

    8 slots of 2 nodes, dp_shard 4, tp 2     [0 1] [2 3] [4 5] [6 7]      tp inside nodes, FSDP across
    the same, dp_replicate 2, dp_shard 2     [0 1  2 3] [4 5  6 7]        FSDP inside nodes, copies across

Where a node has a number of slots that is no multiple of a group, whole groups come first, and what the nodes have left
over makes up the last ones: these talk over the network, and no others do.

    slots 0-2 and 4-6 of these nodes, tp 2   [0 1] [4 5] [2 6]
"""

from collections.abc import Iterable, Sequence

from ductile.core.layout.geometry.parallel_layout import ParallelDims, ParallelLayout
from ductile.core.layout.geometry.topology import Topology


def arranged(slots: Iterable[int], dims: ParallelDims, topology: Topology) -> tuple[int, ...]:
    """Return the slots in the order of ranks that keeps most of each axis's messages inside nodes, the innermost axis
    first. Slots of one node stay in the order that they come in; so do all where they share one node."""
    slots = tuple(slots)
    if not topology.spans(slots):
        return slots
    of_rank = dims.cp * dims.tp
    return in_whole_groups(slots, (dims.dp_shard * of_rank, of_rank, dims.tp), topology)


def in_whole_groups(slots: Iterable[int], sizes: Sequence[int], topology: Topology) -> tuple[int, ...]:
    """Return the slots node by node, whole groups of the first size first, then whole ones of the next size, and so on;
    slots that no group inside their node takes come last."""
    left, found = topology.by_node(slots), list[int]()
    for size in (*sizes, 1):
        for own in left.values():
            whole = len(own) // size * size
            found += own[:whole]
            del own[:whole]
    return tuple(found)


def chosen(
    staying: Sequence[int], joining: Sequence[int], number: int, size: int, topology: Topology
) -> tuple[int, ...]:
    """Return so many of the slots to train on, first of those that do and stay, in such a way that as many groups of
    `size` as can be are inside nodes: the third slot of a node is of no use to tp 2, where another node has two."""
    if size == 1 or not topology.nodes:
        return (*staying, *joining)[:number]
    own = in_whole_groups(staying, (size,), topology)
    num_whole = sum(len(slots) // size * size for slots in topology.by_node(staying).values())
    others = in_whole_groups((*own[num_whole:], *joining), (size,), topology)
    return (*own[:num_whole], *others)[:number]


def split_groups(layout: ParallelLayout, topology: Topology, axes: Sequence[str] = ("tp",)) -> list[tuple[int, ...]]:
    """Return the groups of the layout along these axes whose slots are on several nodes."""
    if not topology.spans(layout.slots):
        return []
    groups = dict.fromkeys(layout.group(slot, axes) for slot in layout.slots)
    return [group for group in groups if topology.spans(group)]


def inside_first(order: ParallelLayout, by_nodes: ParallelLayout, topology: Topology) -> ParallelLayout:
    """Return the layout `order`, whose slots are where they move least of the state, unless it has more groups on
    several nodes than `by_nodes`, which is `arranged`: the state moves once, and messages go in every step."""
    return min((order, by_nodes), key=lambda layout: _num_split(layout, topology))


def _num_split(layout: ParallelLayout, topology: Topology) -> tuple[int, ...]:
    axes = (("tp",), ("cp", "tp"), ("dp_shard", "cp", "tp"))
    return tuple(len(split_groups(layout, topology, each)) for each in axes)


def is_inside(reach: int, num_slots: int, slots_per_node: int | None) -> bool:
    """Return whether groups that reach over so many neighbouring ranks, of so many in all, are inside nodes, each of
    which has so many of them. None: all share one node."""
    return slots_per_node is None or num_slots <= slots_per_node or slots_per_node % reach == 0
