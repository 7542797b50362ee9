"""Events of nodes, in runs over several machines: they are asked for, join, and are lost."""

from ductile.observe import RunEvent


class NodesAwaited(RunEvent, tag="nodes_awaited", frozen=True):
    """The run waits for nodes before it begins."""

    num_nodes: int
    """Nodes that are still to come."""
    address: str
    """host:port at which they join."""


class NodesRequested(RunEvent, tag="nodes_requested", frozen=True):
    """The manager of the machines is asked to bring nodes, or to leave those that are there."""

    num_nodes: int
    """All that the run is to have."""


class NodeJoined(RunEvent, tag="node_joined", frozen=True):
    """A machine has joined, at the run's begin or while it is at work."""

    node: int
    host: str
    address: str
    slots: tuple[int, ...]
    """Slots that it has room for."""


class NodeWasLost(RunEvent, tag="node_lost", frozen=True):
    """A node is lost, with all its slots; or it could not join."""

    node: int
    preempted: bool = False
    """True where the manager of the machines has taken it away."""


class NodeWasNoticed(RunEvent, tag="node_noticed", frozen=True):
    """Who manages the machines is about to take a node away."""

    node: int
    slots: tuple[int, ...]
    within_s: float | None = None
    """Seconds until then; None where that is not said."""
