"""The trainer's layout as a config asks for it: the rules by which it follows from the number of slots, and all that is
wrong with them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Literal

from ductile.config.checks.asked_placement import placement_of, topology_of
from ductile.config.checks.beside_training import generator_bytes, scorer_bytes
from ductile.config.checks.device_kind import device_kind
from ductile.config.checks.on_disk import read_spec
from ductile.config.finding import Finding
from ductile.config.reading.key_tree import keys
from ductile.config.schema.model import TrainerModelConfig
from ductile.config.schema.optimizer_state import optimizer_state
from ductile.config.schema.run import RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.trainer import (
    AdamWConfig,
    MuonConfig,
    OptimConfig,
    ResizeConfig,
    SignSGDConfig,
    TrainerConfig,
)
from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import LayoutRules, choose_layout, dims_allowed, plan_listed
from ductile.core.layout.choice.layout_text import LayoutTextError, parse_sizes
from ductile.core.layout.choice.memory_levers import in_words as relief_in_words
from ductile.core.layout.choice.memory_levers import relief
from ductile.core.layout.choice.planner import LayoutFinding, plan_layout
from ductile.core.layout.choice.possible_layouts import possible_layouts
from ductile.core.layout.choice.slot_memory import USABLE, SlotMemory
from ductile.core.layout.geometry.parallel_layout import ParallelDims, ParallelLayout
from ductile.core.layout.memory.options import DTYPE_BYTES, Checkpointing, LeverName, MemoryOptions, RuleName
from ductile.core.layout.memory.parts import gib
from ductile.core.layout.model.parameters import parameters
from ductile.core.layout.model.peak import compute_dtype
from ductile.core.layout.model.spec import ModelSpec
from ductile.disk import free_bytes, show_bytes

TrainingConfig = RLConfig | SFTConfig | TrainerRunConfig
GIB = 2**30
CONTEXT_BYTES = {"cpu": 0, "cuda": GIB}
"""About what a process takes of a device before it has a tensor: driver, kernels, NCCL's buffers."""


def layout_rules(config: TrainingConfig) -> LayoutRules:
    """The rules of a run. A listed layout that is no text of one counts as absent: `layout_findings` refuses it."""
    model, resize, _ = _trainer(config)
    listed = tuple(text for text in resize.layouts if not _unreadable(text))
    placement, deployment = placement_of(config), config.deployment
    per_group = None if deployment.type == "single_node" else deployment.nodes_per_fsdp_group
    rules = LayoutRules(
        _spec(model),
        asked_layout(model),
        listed,
        num_samples(config),
        slot_memory(config),
        topology=topology_of(config, placement),
        nodes_per_fsdp_group=per_group,
    )
    return rules.beginning_on(len(placement.train))


def slot_memory(config: TrainingConfig) -> SlotMemory | None:
    """What training keeps on a slot, and the room for it; None where `cluster.device_memory_gib` is not written."""
    cluster = config.cluster
    if cluster.device_memory_gib is None:
        return None
    of_slot = cluster.device_memory_gib * GIB / cluster.slots_per_device
    return SlotMemory(room_bytes=int(of_slot * USABLE), options=memory_options(config))


def memory_options(config: TrainingConfig) -> MemoryOptions:
    """Return the options on which the memory of a slot of the trainer depends, besides model and layout."""
    cluster, trainer = config.cluster, config.trainer if isinstance(config, RLConfig) else config
    options = trainer_memory(trainer, device_kind(cluster.device))
    if isinstance(config, RLConfig):
        generator, scorer = generator_bytes(config, options.device), scorer_bytes(config, options.device)
        return replace(options, generator_bytes=generator, scorer_bytes=scorer)
    return replace(options, num_samples=num_samples(config))  # in RL it begins with the groups that are finished


def trainer_memory(
    trainer: TrainerConfig | SFTConfig | TrainerRunConfig, device: Literal["cpu", "cuda"]
) -> MemoryOptions:
    """The same for a slot on such a device that only trains."""
    model, asked = trainer.model, asked_layout(trainer.model)
    dtype, ac, offloading = DTYPE_BYTES[model.optimization_dtype], model.ac, model.ac_offloading
    return MemoryOptions(
        parameter_bytes=dtype,
        compute_bytes=DTYPE_BYTES[compute_dtype(model.compute_dtype, device)],
        reduce_bytes=DTYPE_BYTES[model.reduce_dtype],
        optimizer_bytes=state_bytes(trainer) - 2 * dtype,
        rule=_rule(trainer.optim),
        reduce_every_step=model.reduce_every == "step",
        reshard_after_forward=model.reshard_after_forward,
        checkpointing=None if ac is None else Checkpointing(ac.mode, ac.freq, tuple(ac.targets)),
        offloaded_in_flight=None if offloading is None else offloading.max_inflight_activations,
        optim_cpu_offload=model.optim_cpu_offload,
        fsdp_cpu_offload=model.fsdp_cpu_offload,
        head_chunk_tokens=model.head_chunk_tokens,
        fp32_lm_head=model.fp32_lm_head,
        device=device,
        context_bytes=CONTEXT_BYTES[device],
        cp_style=asked.cp_style,
        pp_schedule=asked.pp_schedule,
        num_runs=asked.num_runs,
        seq_len=asked.seq_len,
        excluded=tuple(_excluded(trainer)),
    )


def _rule(optim: OptimConfig) -> RuleName:
    if isinstance(optim, MuonConfig):
        return "muon"
    if isinstance(optim, SignSGDConfig):
        return "sign_sgd"
    return "adamw_8bit" if isinstance(optim, AdamWConfig) and optim.moments == "8bit" else "torch"


def _excluded(trainer: TrainerConfig | SFTConfig | TrainerRunConfig) -> Iterator[LeverName]:
    """Yield what `ductile.config.checks.exclusions` would refuse beside what the config has."""
    model = trainer.model
    if model.compile is not None or model.attn == "flex" or model.multiplies_8_bits:
        yield "selective"
    if isinstance(trainer.optim, MuonConfig):
        yield "fsdp_cpu_offload"


def state_bytes(trainer: TrainerConfig | SFTConfig | TrainerRunConfig) -> float:
    """Bytes of a parameter, its gradient and what the optimizer keeps for it, on average; of a model that cannot be
    read, what AdamW keeps."""
    dtype, spec = trainer.model.optimization_dtype, _spec(trainer.model)
    kept = 2.0 * DTYPE_BYTES[dtype] if spec is None else mean_state_bytes(trainer.optim, spec, dtype)
    return 2 * DTYPE_BYTES[dtype] + kept


def mean_state_bytes(config: OptimConfig, spec: ModelSpec, dtype: str) -> float:
    """Return the bytes that the optimizer keeps for each number of a model's trained parameters, on average."""
    blocks: Mapping[str, int] = {}
    if isinstance(config, AdamWConfig) and config.moments == "8bit":
        from ductile.core.layout.geometry.strategy import block_columns  # loads numpy

        blocks = block_columns(spec)
    item_bytes, total = {**DTYPE_BYTES, "uint8": 1}, 0.0
    for parameter in (each for each in parameters(spec) if each.is_trained):
        of_number = 0.0
        for kept in optimizer_state(config, parameter.name, dtype, columns=blocks.get(parameter.name, 0)):
            if kept.layout != "scalar":
                of_number += item_bytes[kept.dtype] / max(1, kept.columns)
        total += of_number * prod(parameter.shape)
    return total / spec.num_trained


def room_warnings(config: RLConfig | SFTConfig) -> Iterator[str]:
    """Return whether the disk has no room for a checkpoint: parameters and what the optimizer keeps for them."""
    trainer = config.trainer if isinstance(config, RLConfig) else config
    if config.bench is not None or (spec := _spec(trainer.model)) is None:
        return
    each = DTYPE_BYTES[trainer.model.optimization_dtype]
    moments = state_bytes(trainer) - 2 * each
    needed, folder = spec.num_parameters * each + int(spec.num_trained * moments), Path(config.output_dir)
    try:
        free = free_bytes(folder.absolute())
    except OSError:
        return  # told by who looks for the folder
    if free < needed:
        yield (
            f"output_dir = {folder}: a checkpoint takes about {show_bytes(needed)}, and {show_bytes(free)} are free "
            f"there. Make room, or give another --output-dir, before the first save"
        )


def asked_layout(model: TrainerModelConfig) -> AskedLayout:
    return AskedLayout(
        pp=model.pp,
        dp_replicate=model.dp_replicate,
        cp=model.cp,
        tp=model.tp,
        cp_style=model.cp_style,
        pp_schedule=model.pp_schedule,
        vpp=model.vpp,
        seq_len=model.seq_len,
    )


def layout_findings(config: TrainingConfig, num_slots: int) -> Iterator[Finding]:
    """Everything that keeps the trainer from its layout on so many slots, or from a listed one."""
    rules, (_, _, root) = layout_rules(config), _trainer(config)
    yield from listed_findings(config)
    if choose_layout(num_slots, rules).listed:
        return  # the run begins with it
    errors = plan_layout(num_slots, rules.asked, rules.spec).errors
    for error in errors:
        if not unbuilt({error.keys[0]: error.value}):  # which is told already
            yield Finding(tuple(f"{root}model.{key}" for key in error.keys), error.what)
    if not errors:
        yield from _memory_findings(rules, num_slots, root)
        yield from _block_findings(config, rules, num_slots, root)


def layout_warnings(config: TrainingConfig, num_slots: int) -> Iterator[str]:
    """What is accepted, and good to know."""
    rules, (_, _, root) = layout_rules(config), _trainer(config)
    chosen = choose_layout(num_slots, rules)
    if chosen.listed and (unused := _not_taken(rules.asked, chosen.layout.dims)):
        keys = " and ".join(f"{root}model.{axis} = {size}" for axis, size in unused.items())
        yield f"{keys}: not on {num_slots} slots, for which {root}resize.layouts has {chosen.listed!r}"
    for warning in chosen.planned.warnings:
        layout = chosen.planned.layout
        is_of_memory = layout is not None and warning == chosen.planned.too_little
        advice = f": {_relief(rules, layout.dims, root)}" if layout and is_of_memory else ""
        yield f"{_sentence(warning, f'{root}model.')}{advice}"
    yield from _without_effect(rules, root)
    for place, listed in enumerate(rules.listed):
        sizes, before = parse_sizes(listed), rules.listed[:place]
        if "dp_shard" not in sizes:  # it fits more numbers of slots than one
            before = tuple(text for text in before if "dp_shard" not in parse_sizes(text))
        if first := choose_layout(prod(sizes.values()), replace(rules, listed=before)).listed:
            yield f"{root}resize.layouts: {listed!r} is never taken, as {first!r} before it fits as many slots"


def _memory_findings(rules: LayoutRules, num_slots: int, root: str) -> Iterator[Finding]:
    """Training that has no room on so many slots, in whichever layout."""
    if rules.spec is None or rules.memory is None:
        return
    spec, memory, asked = rules.spec, rules.memory, rules.asked
    layouts = possible_layouts(spec, num_slots, asked.cp_style, asked.num_runs)
    least = min(layouts, key=lambda dims: memory.use(spec, dims, asked).device.total, default=None)
    if least is None or (use := memory.use(spec, least, asked).device).total <= memory.room_bytes:
        return
    slots = "the one train slot" if num_slots == 1 else f"the {num_slots} train slots"
    what = (
        f"is too little: in whichever layout of {slots}, one needs at least {gib(use.total)} GiB ({use.in_words()}) "
        f"and has {gib(memory.room_bytes)} GiB: {_relief(rules, least, root)}"
    )
    yield Finding(("cluster.device_memory_gib",), what)


def _block_findings(config: TrainingConfig, rules: LayoutRules, num_slots: int, root: str) -> Iterator[Finding]:
    """A tp that cuts blocks of 8-bit moments."""
    optim, spec = (config.trainer if isinstance(config, RLConfig) else config).optim, rules.spec
    if spec is None or not isinstance(optim, AdamWConfig) or optim.moments != "8bit":
        return
    from ductile.core.layout.geometry.strategy import block_layout  # loads numpy

    sizes = {choose_layout(num_slots, rules).layout.dims.tp, *(parse_sizes(text).get("tp", 1) for text in rules.listed)}
    if rules.asked.tp == "auto":  # a resize, too, takes what it chooses
        sizes |= {dims.tp for dims in dims_allowed(len(placement_of(config).slots), rules).values()}
    for tp in sorted(sizes):
        try:
            block_layout(spec, ParallelLayout.of(range(tp), tp=tp))
        except ValueError as error:
            yield Finding((f"{root}optim.moments", f"{root}model.tp"), f"does not go with this layout: {error}")


def _relief(rules: LayoutRules, dims: ParallelDims, root: str) -> str:
    """What to write so that training fits, the cheapest first."""
    if rules.spec is None or rules.memory is None:
        return ""
    memory = replace(rules.memory, least_bytes=0)
    found = relief(rules.spec, rules.asked, dims, memory, built_keys())
    return relief_in_words(found, memory, f"{root}model.")


def built_keys() -> frozenset[str]:
    """Keys of `trainer.model` that do something."""
    return frozenset(name for name, key in keys(TrainerModelConfig).items() if key.not_built is None)


def unbuilt(sizes: Mapping[str, object]) -> list[str]:
    """A sentence for each axis above 1 that is not built yet."""
    above_one = {axis: size for axis, size in sizes.items() if size != 1 and axis in TrainerModelConfig.model_fields}
    marks = {axis: keys(TrainerModelConfig)[axis].not_built for axis in above_one}
    return [f"{axis} = {above_one[axis]}. {mark.sentence()}" for axis, mark in marks.items() if mark]


def _without_effect(rules: LayoutRules, root: str) -> Iterator[str]:
    """Keys that say how the slots of an axis work together, where no layout of the run has the axis."""
    asked, listed = rules.asked, [parse_sizes(text) for text in rules.listed]
    written = {
        "pp": {"pp_schedule": asked.pp_schedule != "1f1b", "vpp": asked.vpp not in (1, "auto")},
        "cp": {"cp_style": asked.cp_style != "auto"},
    }
    for axis, keys_of_axis in written.items():
        if getattr(asked, axis) == 1 and all(sizes.get(axis, 1) == 1 for sizes in listed):
            for key in (key for key, is_written in keys_of_axis.items() if is_written):
                yield f"{root}model.{key} = {getattr(asked, key)} has no effect without {root}model.{axis} above 1"


def _not_taken(asked: AskedLayout, dims: ParallelDims) -> dict[str, object]:
    """Sizes that were asked for and that the layout does not have."""
    sizes: dict[str, object] = {axis: getattr(asked, axis) for axis in ("pp", "dp_replicate", "cp", "tp")}
    return {axis: size for axis, size in sizes.items() if size not in (1, "auto", getattr(dims, axis))}


def listed_findings(config: TrainingConfig) -> Iterator[Finding]:
    """Listed layouts that are no text of one, or that the trainer cannot have on whatever slots."""
    rules, (_, resize, root) = layout_rules(config), _trainer(config)
    key = f"{root}resize.layouts"
    for text in resize.layouts:
        if wrong := _unreadable(text):
            yield Finding((key,), f"{text!r}: {wrong}")
            continue
        sizes = parse_sizes(text)
        if refused := unbuilt(sizes):
            yield Finding((key,), f"{text!r} has {' '.join(refused)}")
            continue
        planned = plan_listed(text, prod(sizes.values()), rules)
        if planned and planned.errors:
            yield Finding((key,), f"{text!r}: {'; '.join(error.sentence for error in planned.errors)}")


def _unreadable(text: str) -> str:
    try:
        parse_sizes(text)
    except LayoutTextError as error:
        return str(error)
    return ""


def _sentence(finding: LayoutFinding, root: str) -> str:
    at = root if finding.keys[0] in TrainerModelConfig.model_fields else ""
    return f"{at}{finding.sentence}"


def _trainer(config: TrainingConfig) -> tuple[TrainerModelConfig, ResizeConfig, str]:
    """The model's section, that of resizes, and what stands before their keys."""
    if isinstance(config, RLConfig):
        return config.trainer.model, config.trainer.resize, "trainer."
    return config.model, config.resize, ""


def _spec(model: TrainerModelConfig) -> ModelSpec | None:
    spec, num_layers = read_spec(model.name), model.debug.num_layers
    if spec is None:
        return None
    return replace(spec, num_layers=min(num_layers or spec.num_layers, spec.num_layers), lora=model.adapters)


def model_section(config: TrainingConfig) -> tuple[TrainerModelConfig, str]:
    """The section of the trained model, and what stands before "model" in its keys."""
    model, _, root = _trainer(config)
    return model, root


def model_spec(config: TrainingConfig) -> ModelSpec | None:
    """The model that a config trains; None where it names none that can be read."""
    return _spec(_trainer(config)[0])


def num_samples(config: TrainingConfig) -> int | None:
    """Samples of an optimizer step; None where the config does not say how many."""
    if isinstance(config, RLConfig):
        return max(1, config.orchestrator.batch_size // config.orchestrator.n_minibatches)
    if isinstance(config, SFTConfig):
        return config.data.batch_size
    return config.data.fake.batch_size if config.data.fake else None
