"""Which cluster is a run's? The one place that chooses."""

from ductile.cluster.cluster import ClusterSpec
from ductile.cluster.joined import JoinedCluster
from ductile.cluster.local import LocalCluster
from ductile.cluster.nodes import NodesCluster
from ductile.cluster.ray.ray_cluster import RayCluster
from ductile.config.schema.cluster import ClusterConfig, RayConfig


def make_cluster(spec: ClusterSpec, ray: RayConfig | None = None) -> NodesCluster:
    """Return the cluster that a config asks for, not started yet: nodes of Ray, this machine alone, or machines
    that join."""
    if ray is not None:
        return RayCluster(spec, ray)
    if not has_several_nodes(spec.config):
        return LocalCluster(spec.slots, spec.config, spec.folder / "logs", spec.roles)
    return JoinedCluster(spec)


def has_several_nodes(config: ClusterConfig, ray: RayConfig | None = None) -> bool:
    """Return whether the run has, or can come to have, nodes that join it."""
    return ray is not None or (config.max_nodes or config.num_nodes) > 1 or not config.head_is_node
