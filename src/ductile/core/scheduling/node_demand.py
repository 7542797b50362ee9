"""How many nodes should a run have? Asked where somebody else brings and takes machines, such as Ray's autoscaler.

1. Before it is at work, a run needs the nodes that it begins with.
2. One more is of use where a policy gives its slots work, and the slots that are there have lacked none: a train slot
   that waits for completions is no such lack, since more generators would have them sooner; a generator without
   requests is. What one more has brought is seen before the next is asked for.
3. Nodes that are there are asked for as well: who manages the machines may take what nobody asks for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ductile.core.instances.placement import many
from ductile.core.scheduling.facts.ledger import IdleCause

LACKS: frozenset[IdleCause] = frozenset(("tail", "queue_full", "queue_empty", "held", "no_role"))
"""Causes for which a slot is idle, and further slots would be, too."""
MOST_LACKED = 0.1
"""Share of the slots' time in which they may have lacked work, and one more node is still asked for. One that has been
asked for is wanted on up to twice that: machines are not brought and taken with every step."""


@dataclass(frozen=True, slots=True)
class NodeDemand:
    num_nodes: int
    """All that the run is to have, those that are there included."""
    reason: str
    """A sentence without its full stop."""


def lacked_share(idle_s: Mapping[IdleCause, float], slot_s: float) -> float | None:
    """Return the share of the slots' time in which they lacked work; None where no time has passed.

    idle_s: idle seconds by cause. slot_s: what there was to spend, over all slots.
    """
    if slot_s <= 0:
        return None
    return sum(spent_s for cause, spent_s in idle_s.items() if cause in LACKS) / slot_s


def first_demand(num_nodes: int) -> NodeDemand:
    """Return what a run asks for that is not at work yet."""
    return NodeDemand(num_nodes, f"the run begins with {many(num_nodes, 'node')}")


def node_demand(
    num_nodes: int, max_nodes: int, num_there: int, is_scheduled: bool, lacked: float | None, num_asked: int = 0
) -> NodeDemand:
    """Return what a run asks for that is at work.

    num_nodes, max_nodes: that it begins with, and that it may have. num_there: nodes that it has. is_scheduled: a
    policy moves slots between roles. lacked: as of `lacked_share`, lately. num_asked: nodes that the run asks for now.
    """
    kept = max(num_nodes, min(num_there, max_nodes))
    if num_there < num_nodes:
        return NodeDemand(kept, f"it has {many(num_there, 'node')}, and began with {num_nodes}")
    if num_there >= max_nodes:
        return NodeDemand(kept, f"it has all {many(max_nodes, 'node')} that it may have")
    if not is_scheduled:
        return NodeDemand(kept, "no policy would give the slots of another node work (cluster.auto_scheduler)")
    if lacked is None:
        return NodeDemand(kept, "it is not known yet how busy its slots are")
    if lacked > (2 * MOST_LACKED if num_asked > num_there else MOST_LACKED):
        return NodeDemand(kept, f"its slots lacked work for {lacked:.0%} of the last step")
    return NodeDemand(num_there + 1, f"its slots lacked work for {lacked:.0%} of the last step, and one more has some")
