"""The placement that a config asks for: `core.instances.placement` for each command."""

from ductile.config.schema.cluster import GroupPlacement
from ductile.config.schema.run import InferenceRunConfig, RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.section import Section
from ductile.config.schema.trainer import needs_reference
from ductile.core.instances.node_groups import InGroup, groups_of_nodes, without_groups
from ductile.core.instances.node_slots import SlotsPerNode, slots_per_node
from ductile.core.instances.placement import Placement, Role, SlotsGiven, place

SlotsConfig = RLConfig | SFTConfig | TrainerRunConfig
"""Configs of the commands that start slots."""


def placement_of(config: Section) -> Placement:
    """Which slot does what. A command without slots of its own (the orchestrator) gets an empty placement.

    It follows from the config alone, so that a config means the same on every machine. Raises PlacementError, which
    says why the placement cannot be and what to write instead.
    """
    if isinstance(config, RLConfig):
        deployment = config.deployment
        if deployment.type == "multi_node":
            return Placement((), (), (), "multi-node deployments are not built yet")
        has_servers = config.orchestrator.client.base_url is not None or config.inference.registry is not None
        needs: list[Role] = ["train"]
        if not has_servers:
            needs.append("generate")
        if needs_reference(config.trainer.loss):
            needs.append("score")
        num_train, num_generate = deployment.num_train_gpus, deployment.num_infer_gpus
        return place(
            _entries(config), num_train=num_train, num_generate=num_generate, needs=needs, num_all=_num_all(config)
        )
    if isinstance(config, SFTConfig | TrainerRunConfig):
        num_gpus = config.deployment.num_gpus if config.deployment.type == "single_node" else 1
        return place(_entries(config), num_train=num_gpus, num_generate=0, needs=("train",), num_all=_num_all(config))
    if isinstance(config, InferenceRunConfig):
        return Placement((), (0,), (), "a server is one process on one device")
    return Placement((), (), (), "this command has no slots of its own")


def slots_per_node_of(config: SlotsConfig, placement: Placement) -> SlotsPerNode:
    """Return how many slots each node of a run has."""
    cluster = config.cluster
    return slots_per_node(_each_has(config), placement.num_slots, cluster.num_nodes, shared_out=not _is_given(config))


def _each_has(config: SlotsConfig) -> int:
    return config.deployment.gpus_per_node * config.cluster.slots_per_device


def _is_given(config: SlotsConfig) -> bool:
    """Whether the config says how many slots a node has also on CPUs."""
    return "gpus_per_node" in config.deployment.model_fields_set or bool(config.cluster.node_groups)


def _num_all(config: SlotsConfig) -> int | None:
    """Return how many slots all nodes have, where there are several and that is known."""
    cluster = config.cluster
    if cluster.num_nodes == 1 or (cluster.device == "cpu" and not _is_given(config)):
        return None
    return cluster.num_nodes * _each_has(config)


def _entries(config: SlotsConfig) -> dict[str, SlotsGiven] | None:
    """Return `cluster.component_placement` with slots of the whole run. Raises PlacementError."""
    cluster = config.cluster
    groups = [(group.label, group.node_ranks) for group in cluster.node_groups or ()]
    nodes = groups_of_nodes(groups, cluster.num_nodes)
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
