"""Values that follow from others, written into the config so that it says everything: each with its reason."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from ductile.config.checks.asked_placement import SlotsConfig, num_nodes, placement_of
from ductile.config.reading.errors import dotted
from ductile.config.reading.key_tree import keys, value_at
from ductile.config.reading.provenance import Draft, Path
from ductile.config.reading.share import SHARED, follows
from ductile.config.schema.cluster import MultiNodeDeployment
from ductile.config.schema.run import InferenceRunConfig, RLConfig, SFTConfig, TrainerRunConfig
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


def what_follows(config: Section, table: dict[str, Any]) -> list[Path]:
    """Keys of the config, dumped as `table`, that have the value that they get when they are absent, and get another
    one when something else is written.

    A resolved config leaves them out, so that a flag beside it means what it means beside the file that the user wrote:
    it meets no value that nobody did write.
    """
    lengths = _LENGTHS.get(type(config), ())
    # A default of such a key would contradict a flag for one of its targets.
    shared = [tuple(rule.key.split(".")) for rule in SHARED.get(type(config), ()) if rule.must_agree]
    absent = [derived.path for derived in _derived(config)]
    tables = {path: cast(Section | None, value_at(config, path[:-1])) for path in (*lengths, *shared)}
    absent += [path for path, table_of in tables.items() if table_of is not None and _is_unset(table_of, path[-1])]
    absent += _defaults_of_a_type(config)
    rest = Draft(table).copy()
    for path in absent:
        rest.drop(path)
    return list(dict.fromkeys(path for path in (*absent, *follows(type(config), rest)) if Draft(table).has(path)))


_LENGTHS: dict[type[Section], tuple[tuple[str, ...], ...]] = {
    RLConfig: (
        ("trainer", "model", "seq_len"),
        ("inference", "model", "max_model_len"),
        ("orchestrator", "sampling", "max_tokens"),
        ("orchestrator", "eval", "sampling", "max_tokens"),
    ),
    InferenceRunConfig: (("model", "max_model_len"),),
}
"""Lengths that follow from the model where nobody writes them (`checks/model_lengths.py`)."""


def _defaults_of_a_type(
    section: Section, path: tuple[str, ...] = (), is_given: bool = True
) -> Iterator[tuple[str, ...]]:
    """Keys that nobody wrote, and whose default hangs on the `type` of their table.

    is_given: whether something of `section` was written. A default may set keys of its own.
    """
    for name, key in keys(type(section)).items():
        table = cast(object, getattr(section, name))
        if not isinstance(table, Section):
            continue
        here, table_is_given = (*path, name), is_given and name in section.model_fields_set
        if key.is_union:
            written = table.model_fields_set if table_is_given else set[str]()
            built = [keys(variant) for variant in key.variants if keys(variant)["type"].not_built is None]
            for inner in keys(type(table)).keys() - {"type"} - written:
                defaults = [variant[inner].default for variant in built if inner in variant]
                if isinstance(key.default, type(table)):
                    defaults.append(cast(object, getattr(key.default, inner)))
                if any(default != defaults[0] for default in defaults):
                    yield (*here, inner)
        yield from _defaults_of_a_type(table, here, table_is_given)


def _derived(config: Section) -> Iterator[Derived]:
    """All that follows from the rest of the config; the same before and after it is filled in."""
    if isinstance(config, RLConfig):
        placement = placement_of(config)
        dp = len(placement.generate) // config.inference.parallel.tp
        if placement.generate:
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
        yield from _nodes(config)
    elif isinstance(config, SFTConfig | TrainerRunConfig):
        placement = placement_of(config)
        numbers = {"num_gpus": len(placement.train)}
        yield from _nodes(config)
    else:
        return
    if config.deployment.type != "single_node":
        return
    for name, number in numbers.items():
        if config.cluster.component_placement is not None or _is_unset(config.deployment, name):
            yield Derived(("deployment", name), number, placement.reason)


def follow_nodes(config: S) -> tuple[S, tuple[str, ...]]:
    """The config with what follows from the nodes of its deployment, and a sentence for each value that was not there.
    It holds before the trainer's layout is judged."""
    return fill_in(config, _nodes(config) if isinstance(config, SlotsConfig) else ())


def _nodes(config: SlotsConfig) -> Iterator[Derived]:
    """Yield how many nodes the run has, and the copies of the model on them, as the deployment says it."""
    deployment = config.deployment
    model, root = (config.trainer.model, ("trainer",)) if isinstance(config, RLConfig) else (config.model, ())
    if _is_unset(config.cluster, "num_nodes"):
        yield Derived(("cluster", "num_nodes"), num_nodes(config), "the nodes of the deployment")
    if not _is_unset(model, "dp_replicate"):
        return
    copies, why = 1, ""
    if deployment.type == "multi_node" and (per_group := deployment.nodes_per_fsdp_group):
        num_train = deployment.num_train_nodes if isinstance(deployment, MultiNodeDeployment) else deployment.num_nodes
        why = f"deployment.nodes_per_fsdp_group, {per_group} of {num_train} train nodes for one copy"
        copies = num_train // per_group if num_train % per_group == 0 else 1
    yield Derived((*root, "model", "dp_replicate"), copies, why)


def _is_unset(section: Section, name: str) -> bool:
    return name not in section.model_fields_set or getattr(section, name) is None


def _filled(section: S, path: tuple[str, ...], value: int | float) -> S:
    """The section with the value at `path`, as a default has it: not among the fields that the user set."""
    name, *rest = path
    new = _filled(cast(Section, getattr(section, name)), tuple(rest), value) if rest else value
    filled = section.model_copy(update={name: new})
    if not rest or name not in section.model_fields_set:
        filled.model_fields_set.discard(name)
    return filled
