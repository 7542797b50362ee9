"""The placement that a config asks for: `core.instances.placement` for each command."""

from typing import cast

from ductile.config.schema.run import InferenceRunConfig, RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.section import Section
from ductile.config.schema.trainer import needs_reference
from ductile.core.instances.placement import Placement, Role, SlotsGiven, place


def placement_of(config: Section) -> Placement:
    """Which slot does what. A command without slots of its own (the orchestrator) gets an empty placement.

    It follows from the config alone, so that a config means the same on every machine. Raises PlacementError, which
    says why the placement cannot be and what to write instead.
    """
    if isinstance(config, RLConfig):
        entries = cast("dict[str, SlotsGiven] | None", config.cluster.component_placement)
        deployment = config.deployment
        if deployment.type == "multi_node":
            return Placement((), (), (), "multi-node deployments are not built yet")
        has_servers = config.orchestrator.client.base_url is not None or config.inference.registry is not None
        needs: list[Role] = ["train"]
        if not has_servers:
            needs.append("generate")
        if needs_reference(config.trainer.loss):
            needs.append("score")
        return place(entries, num_train=deployment.num_train_gpus, num_generate=deployment.num_infer_gpus, needs=needs)
    if isinstance(config, SFTConfig | TrainerRunConfig):
        entries = cast("dict[str, SlotsGiven] | None", config.cluster.component_placement)
        num_gpus = config.deployment.num_gpus if config.deployment.type == "single_node" else 1
        return place(entries, num_train=num_gpus, num_generate=0, needs=("train",))
    if isinstance(config, InferenceRunConfig):
        return Placement((), (0,), (), "each server is one process on one device")
    return Placement((), (), (), "this command has no slots of its own")
