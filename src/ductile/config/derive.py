"""Values that follow from others, written into the config so that it says everything: each with its reason."""

from typing import Any, TypeVar, cast

from ductile.config.run import RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.section import Section
from ductile.config.slots import placement_of
from ductile.core.cache_size import GPU_UTILIZATION, GPU_UTILIZATION_SHARED
from ductile.core.cluster.placement import Placement

S = TypeVar("S", bound=Section)

FOLLOWING = frozenset({"num_train_gpus", "num_infer_gpus", "num_gpus"})
"""Keys of [deployment] that follow from `cluster.component_placement`."""


def derive(config: S) -> tuple[S, tuple[str, ...]]:
    """A good config with what follows from it filled in, and a sentence for each value that was."""
    reasons: list[str] = []
    out: Section = config
    if isinstance(config, RLConfig):
        placement = placement_of(config)
        inference = config.inference
        if inference.parallel.dp is None:
            dp = len(placement.generate) // inference.parallel.tp
            inference = _with(inference, parallel=_with(inference.parallel, dp=dp))
            reasons.append(f"inference.parallel.dp = {dp}: the generate slots, one copy on each")
        if inference.gpu_memory_utilization is None and config.cluster.device != "cpu":
            others = {*placement.train, *placement.score}
            shared = config.cluster.auto_scheduler or bool(others & set(placement.generate))
            inference = _with(inference, gpu_memory_utilization=GPU_UTILIZATION_SHARED if shared else GPU_UTILIZATION)
            if shared:
                why = "slots that generate may train or score as well"
                reasons.append(f"inference.gpu_memory_utilization = {GPU_UTILIZATION_SHARED}: {why}")
        numbers = {"num_train_gpus": len(placement.train), "num_infer_gpus": len(placement.generate)}
        deployment = _deployment(config.deployment, numbers, placement, reasons)
        out = _with(config, inference=inference, deployment=deployment)
    elif isinstance(config, SFTConfig | TrainerRunConfig):
        placement = placement_of(config)
        numbers = {"num_gpus": len(placement.train)}
        out = _with(config, deployment=_deployment(config.deployment, numbers, placement, reasons))
    return cast(S, out), tuple(reasons)


def without_derived(table: dict[str, Any]) -> dict[str, Any]:
    """A dumped config without what `derive` would fill in again.

    So a resolved config can be run on other slots: a placement given beside the file meets no older numbers.
    """
    copy = dict(table)
    if "component_placement" in table.get("cluster", {}):
        copy["deployment"] = {name: value for name, value in table["deployment"].items() if name not in FOLLOWING}
    if "inference" in table:
        parallel = {name: value for name, value in table["inference"]["parallel"].items() if name != "dp"}
        copy["inference"] = table["inference"] | {"parallel": parallel}
    return copy


def _deployment(deployment: Section, numbers: dict[str, int], placement: Placement, reasons: list[str]) -> Section:
    """The numbers that `cluster.component_placement` amounts to."""
    changed = {name: number for name, number in numbers.items() if getattr(deployment, name) != number}
    reasons += [f"deployment.{name} = {number}: {placement.reason}" for name, number in changed.items()]
    return _with(deployment, **changed) if changed else deployment


def _with(section: S, **values: object) -> S:
    return section.model_copy(update=values)
