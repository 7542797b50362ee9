"""The placement that a config asks for: `core.instances.placement` for each command."""

from typing import cast

from ductile.config.schema.cluster import (
    MultiNodeDeployment,
    MultiNodeServing,
    MultiNodeTrainDeployment,
)
from ductile.config.schema.run import InferenceRunConfig, RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.section import Section
from ductile.config.schema.trainer import needs_reference
from ductile.core.instances.placement import Placement, Role, SlotsGiven, place

SlotsConfig = RLConfig | SFTConfig | TrainerRunConfig


def placement_of(config: Section) -> Placement:
    """Which slot does what. A command without slots of its own (the orchestrator) gets an empty placement.

    It follows from the config alone, so that a config means the same on every machine. Raises PlacementError, which
    says why the placement cannot be and what to write instead.
    """
    if isinstance(config, RLConfig):
        entries = cast("dict[str, SlotsGiven] | None", config.cluster.component_placement)
        deployment = config.deployment
        has_servers = config.orchestrator.client.base_url is not None or config.inference.registry is not None
        needs: list[Role] = ["train"]
        if not has_servers:
            needs.append("generate")
        if needs_reference(config.trainer.loss):
            needs.append("score")
        if deployment.type == "single_node":
            num_train, num_generate = deployment.num_train_gpus, deployment.num_infer_gpus
        else:
            each = slots_per_node(config)
            num_train, num_generate = deployment.num_train_nodes * each, deployment.num_infer_nodes * each
        return place(entries, num_train=num_train, num_generate=num_generate, needs=needs)
    if isinstance(config, SFTConfig | TrainerRunConfig):
        entries = cast("dict[str, SlotsGiven] | None", config.cluster.component_placement)
        deployment = config.deployment
        num_train = (
            deployment.num_gpus if deployment.type == "single_node" else num_nodes(config) * slots_per_node(config)
        )
        return place(entries, num_train=num_train, num_generate=0, needs=("train",))
    if isinstance(config, InferenceRunConfig):
        return Placement((), (0,), (), "a server is one process on one device")
    return Placement((), (), (), "this command has no slots of its own")


def num_nodes(config: SlotsConfig | InferenceRunConfig) -> int:
    """Return the nodes that the deployment has; on a single one they are what `cluster.num_nodes` says."""
    deployment = config.deployment
    match deployment:
        case MultiNodeDeployment():
            return deployment.num_infer_nodes + deployment.num_train_nodes
        case MultiNodeTrainDeployment() | MultiNodeServing():
            return deployment.num_nodes
        case _:
            return config.cluster.num_nodes


def slots_per_node(config: SlotsConfig) -> int:
    """Return the slots that a node has room for."""
    return config.deployment.gpus_per_node * config.cluster.slots_per_device


def most_slots(config: SlotsConfig) -> int:
    """Return the slots that all nodes have room for."""
    return num_nodes(config) * slots_per_node(config)
