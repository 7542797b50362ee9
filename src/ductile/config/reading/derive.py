"""Values that follow from others, written into the config so that it says everything: each with its reason."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from ductile.config.checks.asked_placement import placement_of
from ductile.config.reading.errors import dotted
from ductile.config.reading.key_tree import value_at
from ductile.config.reading.provenance import Draft
from ductile.config.schema.run import RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.section import Section
from ductile.core.cache_size import GPU_UTILIZATION, GPU_UTILIZATION_SHARED

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Derived:
    path: tuple[str, ...]
    value: int | float
    reason: str = ""
    """Why the key has this value; empty for a default that the user need not be told of."""


def derive(config: S) -> tuple[S, tuple[str, ...]]:
    """A good config with what follows from it filled in, and a sentence for each value that was."""
    return fill_in(config, _derived(config))


def fill_in(config: S, derived: Iterable[Derived]) -> tuple[S, tuple[str, ...]]:
    """The config with these values, and a sentence for each that it did not have and that has a reason."""
    reasons: list[str] = []
    for each in derived:
        if value_at(config, each.path) != each.value:
            config = _filled(config, each.path, each.value)
            reasons += [f"{dotted(each.path)} = {each.value}: {each.reason}"] if each.reason else []
    return config, tuple(reasons)


def without_derived(config: Section, table: dict[str, Any]) -> dict[str, Any]:
    """The config, dumped as `table`, without what `derive` would fill in again.

    So a resolved config can be run on other slots, or with the scheduler switched on: what is given beside the file
    meets no value that the user did not write.
    """
    draft = Draft(table).copy()
    for derived in _derived(config):
        draft.drop(derived.path)
    return draft.values


def _derived(config: Section) -> Iterator[Derived]:
    """All that follows from the rest of the config; the same before and after it is filled in."""
    if isinstance(config, RLConfig):
        placement = placement_of(config)
        dp = len(placement.generate) // config.inference.parallel.tp
        yield Derived(("inference", "parallel", "dp"), dp, "the generate slots, one copy on each")
        sized = config.inference.num_blocks is not None or config.inference.cache_memory_gib is not None
        written = sized or not _is_unset(config.inference, "gpu_memory_utilization")
        if not written and config.cluster.device != "cpu":
            others = {*placement.train, *placement.score}
            shared = config.cluster.auto_scheduler or bool(others & set(placement.generate))
            each = config.cluster.slots_per_device
            share = (GPU_UTILIZATION_SHARED if shared else GPU_UTILIZATION) / each
            reasons = ["slots that generate may train or score as well"] if shared else []
            reasons += [f"{each} slots share each GPU (cluster.slots_per_device)"] if each > 1 else []
            value = int(share * 1000) / 1000
            yield Derived(("inference", "gpu_memory_utilization"), value, ", and ".join(reasons))
        numbers = {"num_train_gpus": len(placement.train), "num_infer_gpus": len(placement.generate)}
    elif isinstance(config, SFTConfig | TrainerRunConfig):
        placement = placement_of(config)
        numbers = {"num_gpus": len(placement.train)}
    else:
        return
    if config.cluster.component_placement is not None:
        for name, number in numbers.items():
            yield Derived(("deployment", name), number, placement.reason)


def _is_unset(section: Section, name: str) -> bool:
    return name not in section.model_fields_set or getattr(section, name) is None


def _filled(section: S, path: tuple[str, ...], value: int | float) -> S:
    """The section with the value at `path`, as a default has it: not among the fields that the user set."""
    name, *rest = path
    if rest:
        return section.model_copy(update={name: _filled(cast(Section, getattr(section, name)), tuple(rest), value)})
    filled = section.model_copy(update={name: value})
    filled.model_fields_set.discard(name)
    return filled
