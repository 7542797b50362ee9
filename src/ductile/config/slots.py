"""The placement that a config asks for: `core.cluster.placement` for each command."""

from typing import cast

from ductile.config.run import InferenceRunConfig, RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.section import Section
from ductile.config.trainer import GRPOLoss
from ductile.core.cluster.placement import Entry, Placement, Role, place


def placement_of(config: Section, num_devices: int | None = None) -> Placement:
    """Which slot does what.

    Args:
        config: the config of a command; one without slots of its own (the orchestrator) gets an empty placement.
        num_devices: GPUs of this machine, where slots are GPUs.

    Raises:
        PlacementError: the placement cannot be; says why and what to write instead.
    """
    if isinstance(config, RLConfig):
        entries = cast("dict[str, Entry] | None", config.cluster.component_placement)
        deployment = config.deployment
        if deployment.type == "multi_node":
            return Placement((), (), (), "multi-node deployments are not built yet")
        return place(
            entries,
            num_train=deployment.num_train_gpus,
            num_generate=deployment.num_infer_gpus,
            needs=("train", "generate", "score") if needs_scorer(config) else ("train", "generate"),
            num_devices=num_devices,
        )
    if isinstance(config, SFTConfig | TrainerRunConfig):
        entries = cast("dict[str, Entry] | None", config.cluster.component_placement)
        num_gpus = config.deployment.num_gpus if config.deployment.type == "single_node" else 1
        return place(entries, num_train=num_gpus, num_generate=0, needs=("train",), num_devices=num_devices)
    if isinstance(config, InferenceRunConfig):
        entries = cast("dict[str, Entry] | None", config.cluster.component_placement)
        needs: tuple[Role, ...] = ("generate",)
        dp = config.parallel.dp or 1
        return place(entries, num_train=0, num_generate=dp, needs=needs, num_devices=num_devices)
    return Placement((), (), (), "this command has no slots of its own")


def needs_scorer(config: RLConfig) -> bool:
    """A KL term to the reference model needs the reference model's log-probs."""
    return isinstance(config.trainer.loss, GRPOLoss) and config.trainer.loss.kl_coef > 0
