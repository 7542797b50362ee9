"""Which cluster is a run's? The one place that chooses."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ductile.cluster.joined import JoinedCluster
from ductile.cluster.local import LocalCluster
from ductile.cluster.nodes import NodesCluster
from ductile.cluster.ray.ray_cluster import RayCluster
from ductile.config.schema.cluster import ClusterConfig, RayConfig
from ductile.core.instances.node_slots import SlotsPerNode
from ductile.messages.message import RoleName
from ductile.observe import RunEvent


def make_cluster(
    slots: Sequence[int],
    config: ClusterConfig,
    folder: Path,
    roles: Mapping[RoleName, str],
    per_node: SlotsPerNode,
    tell: Callable[[RunEvent], None] = lambda event: None,
    ray: RayConfig | None = None,
) -> NodesCluster:
    """Return the cluster that a config asks for, not started yet: nodes of Ray, this machine alone, or machines
    that join.

    slots: those of the placement. folder: the run's. per_node: how many a node has. tell: hears of nodes that come and
    go.
    """
    if ray is not None:
        return RayCluster(slots, config, folder, roles, per_node, ray, tell)
    if not has_several_nodes(config):
        return LocalCluster(slots, config, folder / "logs", roles)
    return JoinedCluster(slots, config, folder, roles, per_node, tell)


def has_several_nodes(config: ClusterConfig, ray: RayConfig | None = None) -> bool:
    """Whether the run has, or can come to have, nodes that join it."""
    return ray is not None or (config.max_nodes or config.num_nodes) > 1 or not config.head_is_node
