"""The placement that a config asks for: `core.instances.placement` for each command."""

from ductile.config.schema.cluster import (
    ClusterConfig,
    DisaggregatedServing,
    GroupPlacement,
    MultiNodeDeployment,
    MultiNodeServing,
    MultiNodeTrainDeployment,
    SingleNodeDeployment,
)
from ductile.config.schema.run import InferenceRunConfig, RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.section import Section
from ductile.config.schema.trainer import needs_reference
from ductile.core.instances.node_groups import InGroup, groups_of_nodes, without_groups
from ductile.core.instances.node_slots import SlotsPerNode, slots_per_node
from ductile.core.instances.placement import Placement, Role, SlotsGiven, place
from ductile.core.layout.geometry.topology import Topology

SlotsConfig = RLConfig | SFTConfig | TrainerRunConfig
"""Configs of the commands that start slots."""


def placement_of(config: Section) -> Placement:
    """Which slot does what. A command without slots of its own (the orchestrator) gets an empty placement.

    It follows from the config alone, so that a config means the same on every machine. Raises PlacementError, which
    says why the placement cannot be and what to write instead.
    """
    if isinstance(config, RLConfig):
        needs: list[Role] = ["train"]
        if not _has_servers(config):
            needs.append("generate")
        if needs_reference(config.trainer.loss):
            needs.append("score")
        num_train, num_generate = _counted(config)
        return place(
            _entries(config), num_train=num_train, num_generate=num_generate, needs=needs, num_all=_num_all(config)
        )
    if isinstance(config, SFTConfig | TrainerRunConfig):
        num_train, _ = _counted(config)
        return place(_entries(config), num_train=num_train, num_generate=0, needs=("train",), num_all=_num_all(config))
    if isinstance(config, InferenceRunConfig):
        return Placement((), (0,), (), "each server is one process on one device")
    return Placement((), (), (), "this command has no slots of its own")


def _has_servers(config: RLConfig) -> bool:
    return config.orchestrator.client.base_url is not None or config.inference.registry is not None


def lacks_generators(config: SlotsConfig) -> bool:
    """Return whether a deployment of several nodes has none that generates, where slots have to."""
    deployment, given = config.deployment, config.cluster.component_placement is not None
    if given or not isinstance(config, RLConfig) or not isinstance(deployment, MultiNodeDeployment):
        return False
    return deployment.num_infer_nodes == 0 and not _has_servers(config)


def num_nodes(config: SlotsConfig | InferenceRunConfig) -> int:
    """Return the nodes that the deployment has; on a single one they are what `cluster.num_nodes` says."""
    deployment = config.deployment
    match deployment:
        case MultiNodeDeployment():
            return deployment.num_infer_nodes + deployment.num_train_nodes
        case MultiNodeTrainDeployment() | MultiNodeServing():
            return deployment.num_nodes
        case DisaggregatedServing() if isinstance(config, InferenceRunConfig) and config.slurm is not None:
            return deployment.num_prefill_nodes + deployment.num_decode_nodes
        case _:
            return config.cluster.num_nodes


def most_slots(config: SlotsConfig) -> int:
    """Return the slots that a run has room for on all the nodes that it may come to have."""
    return _each_has(config) * (config.cluster.max_nodes or num_nodes(config))


def slots_per_node_of(config: SlotsConfig, placement: Placement) -> SlotsPerNode:
    """Return how many slots each node of a run has."""
    shared_out = not _is_given(config)
    return slots_per_node(_each_has(config), placement.num_slots, num_nodes(config), shared_out=shared_out)


def topology_of(config: SlotsConfig, placement: Placement) -> Topology:
    """Return the nodes that the slots of a run are on, those that may join it among them. With `device = "auto"` they
    are taken to be GPUs' (a run knows better once its nodes are there)."""
    each, cluster = slots_per_node_of(config, placement), config.cluster
    return topology_by_nodes(each.on_cpus if cluster.device == "cpu" else each.on_gpus, num_nodes(config), cluster)


def topology_by_nodes(slots_per_node: int, num_nodes: int, cluster: ClusterConfig) -> Topology:
    """Return the topology of nodes with so many slots, and with the speeds that the config has."""
    node_bytes_s, network_bytes_s = cluster.node_gb_per_s * 1e9, cluster.network_gb_per_s * 1e9
    return Topology.of(slots_per_node, cluster.max_nodes or num_nodes, node_bytes_s, network_bytes_s)


def _counted(config: SlotsConfig) -> tuple[int, int]:
    """Return how many slots train and how many generate, by the deployment numbers."""
    match config.deployment:
        case MultiNodeDeployment() as deployment:
            return deployment.num_train_nodes * _each_has(config), deployment.num_infer_nodes * _each_has(config)
        case MultiNodeTrainDeployment() as deployment:
            return deployment.num_nodes * _each_has(config), 0
        case SingleNodeDeployment() as deployment:
            return deployment.num_train_gpus, deployment.num_infer_gpus
        case deployment:
            return deployment.num_gpus, 0


def _each_has(config: SlotsConfig) -> int:
    return config.deployment.gpus_per_node * config.cluster.slots_per_device


def _is_given(config: SlotsConfig) -> bool:
    """Return whether the config says how many slots a node has also on CPUs."""
    deployment = config.deployment
    counted = deployment.type == "multi_node" or "gpus_per_node" in deployment.model_fields_set
    return counted or bool(config.cluster.node_groups)


def _num_all(config: SlotsConfig) -> int | None:
    """Return how many slots all nodes have, where there are several and that is known."""
    if num_nodes(config) == 1 or (config.cluster.device == "cpu" and not _is_given(config)):
        return None
    return num_nodes(config) * _each_has(config)


def _entries(config: SlotsConfig) -> dict[str, SlotsGiven] | None:
    """Return `cluster.component_placement` with slots of the whole run. Raises PlacementError."""
    cluster = config.cluster
    groups = [(group.label, group.node_ranks) for group in cluster.node_groups or ()]
    nodes = groups_of_nodes(groups, num_nodes(config))
    if cluster.component_placement is None:
        return None
    entries = {
        names: InGroup(_labels(entry.node_group), entry.placement) if isinstance(entry, GroupPlacement) else entry
        for names, entry in cluster.component_placement.items()
    }
    return without_groups(entries, nodes, _each_has(config))


def _labels(given: str | list[str]) -> tuple[str, ...]:
    labels = given.split(",") if isinstance(given, str) else given
    return tuple(label.strip() for label in labels)
