"""The fits that `ductile fit` finds, as text, as TOML and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, cast

from ductile.config.checks.exclusions import exclusion_findings
from ductile.config.checks.on_disk import model_findings
from ductile.config.checks.trainer_layout import (
    TrainingConfig,
    asked_layout,
    built_keys,
    layout_findings,
    layout_rules,
    listed_findings,
    model_section,
    model_spec,
    num_samples,
    slot_memory,
)
from ductile.config.reading.derive import derive
from ductile.config.schema.cluster import MultiNodeDeployment, MultiNodeTrainDeployment, SingleNodeDeployment
from ductile.config.schema.model import TrainerModelConfig
from ductile.config.schema.run import RLConfig
from ductile.config.schema.section import Section
from ductile.config.schema.trainer import ResizeConfig
from ductile.core.instances.placement import many
from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import plan_listed
from ductile.core.layout.choice.layout_text import in_words
from ductile.core.layout.choice.memory_levers import AXES, relief, spelled
from ductile.core.layout.choice.memory_levers import in_words as relief_in_words
from ductile.core.layout.choice.possible_layouts import possible_layouts
from ductile.core.layout.choice.slot_memory import SlotMemory
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.memory.parts import GIB, gib
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.scheduling.costs.layout_time import SlotSpeed
from ductile.core.scheduling.layout_search import KNOBS, TrainingFit, best_fits

ASSUMED_SAMPLES = 64
"""Samples of an optimizer step where the config does not say how many."""


@dataclass(frozen=True)
class FitRequest:
    """A config and the GPUs to fit it on. Its properties raise ValueError for what cannot be reckoned with."""

    config: TrainingConfig
    gpus: int
    gpu_memory: int
    """Bytes of each."""
    gpu: str
    """Name of the GPU, whose peak is reckoned with."""
    host_memory: int
    """Bytes of host memory for each."""
    tokens_per_s: float | None = None
    """Tokens that one slot alone trains on per second; None: as the peak says."""

    @cached_property
    def spec(self) -> ModelSpec:
        if (found := model_spec(self.config)) is not None:
            return found
        name = model_section(self.config)[0].name
        if name is None:
            raise ValueError("the config names no model: write --model.name models/my-model")
        (first, *_) = model_findings("model.name", name, needs_weights=False)
        raise ValueError(f"--model.name = {name} {first.what}")

    @cached_property
    def on_gpus(self) -> TrainingConfig:
        """The config on such GPUs, with a slot on each."""
        device = {"device": "cuda", "device_memory_gib": self.gpu_memory / GIB, "slots_per_device": 1}
        cluster = self.config.cluster.model_copy(update=device)
        found, _ = derive(self.config.model_copy(update={"cluster": cluster}))
        return found

    @cached_property
    def memory(self) -> SlotMemory:
        """Room of a slot of its own on such a GPU."""
        found = slot_memory(self.on_gpus)
        assert found is not None, "the config says how much memory there is"
        return found

    @cached_property
    def speed(self) -> SlotSpeed:
        found = SlotSpeed(tokens_per_s=self.tokens_per_s) if self.tokens_per_s else SlotSpeed.of_device(self.gpu)
        if found is not None:
            cluster = self.config.cluster
            link, network = cluster.node_gb_per_s * 1e9, cluster.network_gb_per_s * 1e9
            machine = found.machine._replace(link_bytes_per_s=link, network_bytes_per_s=network)
            return replace(found, machine=machine, slots_per_node=self.slots_per_node)
        raise ValueError(f"--gpu {self.gpu}: its peak is not known; write H100, H200 or A100, or --tokens-per-s")

    @property
    def slots_per_node(self) -> int | None:
        """GPUs of a node, where the config writes how many a node has and there are more; None: all are of one."""
        deployment = self.config.deployment
        is_said = deployment.type == "multi_node" or "gpus_per_node" in deployment.model_fields_set
        return deployment.gpus_per_node if is_said and self.gpus > deployment.gpus_per_node else None

    @property
    def resize(self) -> ResizeConfig:
        """Its `layouts` are all such as the trainer can have."""
        for wrong in listed_findings(self.config):
            raise ValueError(f"--{wrong.keys[0]}: {wrong.what}")
        return (self.config.trainer if isinstance(self.config, RLConfig) else self.config).resize

    def listed_beside(self, dims: ParallelDims) -> list[str]:
        """Return the listed layouts beside which so many GPUs have this one: of those that are for as many, the one
        that is the same."""
        planned = {text: plan_listed(text, self.gpus, layout_rules(self.config)) for text in self.resize.layouts}
        layouts = {text: None if plan is None else plan.layout for text, plan in planned.items()}
        return [text for text, layout in layouts.items() if layout is None or layout.dims == dims]

    @property
    def asked(self) -> AskedLayout:
        return asked_layout(model_section(self.config)[0])

    @property
    def num_samples(self) -> int:
        return num_samples(self.config) or ASSUMED_SAMPLES

    @property
    def sentence(self) -> str:
        """ "4.02B parameters on 8 GPUs of 80 GiB (H100): steps of 128 samples of 32,768 tokens"."""
        whose = f"{self.tokens_per_s:g} tokens/s a slot" if self.tokens_per_s else self.gpu
        per_node = f", {self.slots_per_node} a node" if self.slots_per_node else ""
        gpus = f"{many(self.gpus, 'GPU')} of {self.gpu_memory / GIB:.4g} GiB ({whose}{per_node})"
        steps = f"steps of {many(self.num_samples, 'sample')} of {self.asked.seq_len:,} tokens"
        return f"{self.spec.num_parameters / 1e9:.3g}B parameters on {gpus}: {steps}"


def find_fits(request: FitRequest, host_memory: int | None) -> list[TrainingFit]:
    """Return the best way to train for each layout that fits, the fastest first, but for those with which
    `ductile check` would refuse other keys of the config. host_memory: bytes of it that each GPU may take; None: any
    number."""
    return [fit for fit in _all_that_fit(request, host_memory) if not _refused(fit, request)]


def _all_that_fit(request: FitRequest, host_memory: int | None) -> list[TrainingFit]:
    spec, memory, speed = request.spec, request.memory, request.speed
    return best_fits(spec, request.gpus, request.asked, memory, request.num_samples, speed, built_keys(), host_memory)


def _refused(fit: TrainingFit, request: FitRequest) -> str:
    """Return what keeps the config from training so, as a sentence; "" where nothing does."""
    config = overlaid(fit, request)
    found = next(iter([*layout_findings(config, request.gpus), *exclusion_findings(config)]), None)
    return "" if found is None else f"{found.keys[0]} {found.what}"


def table(fits: Sequence[TrainingFit]) -> str:
    """Return lines for a person: predicted times and bytes."""
    layouts = [in_words(fit.dims) or "one slot" for fit in fits]
    width = max(36, *(len(layout) + 2 for layout in layouts))
    rows = [f"{'':4}{'step':>10}{'GiB':>8}{'host':>8}  {'layout':{width}}parts of the memory"]
    for number, (fit, layout) in enumerate(zip(fits, layouts, strict=True), 1):
        device, host = fit.use.device, fit.use.host
        rows.append(
            f"{f'#{number}':4}{fit.time.step_s:>8.3g} s{gib(device.total):>8}{gib(host.total):>8}  "
            f"{layout:{width}}{device.in_words()}"
        )
    return "\n".join(rows)


def toml(fit: TrainingFit, request: FitRequest) -> str:
    """Return what to lay over the config, so that it trains so: every axis and knob of which the config has another
    value."""
    model, root = model_section(request.config)
    lines = ["[cluster]"]
    lines += ['device = "cuda"'] if request.config.cluster.device != "cuda" else []
    lines += [f"device_memory_gib = {_exactly(request.gpu_memory / GIB)}"]
    lines += ["slots_per_device = 1"] if request.config.cluster.slots_per_device != 1 else []
    lines += ["", *_deployment(request)]
    changes = _changes(fit, model)
    if (listed := request.listed_beside(fit.dims)) != request.resize.layouts:
        lines += ["", f"[{root}resize]", f"layouts = {spelled(listed)}"]
    if plain := {key: value for key, value in changes.items() if not isinstance(value, Mapping)}:
        lines += ["", f"[{root}model]", *(f"{key} = {spelled(value)}" for key, value in plain.items())]
    for key, value in changes.items():
        if isinstance(value, Mapping):
            written = cast("Mapping[str, object]", value)
            lines += ["", f"[{root}model.{key}]", *(f"{name} = {spelled(each)}" for name, each in written.items())]
    return "\n".join(lines)


def overlaid(fit: TrainingFit, request: FitRequest) -> TrainingConfig:
    """Return the config with what `toml` says, but for the deployment."""
    config = request.on_gpus
    model, _ = model_section(config)
    changes: dict[str, object] = {}
    for key, value in _changes(fit, model).items():
        if isinstance(value, Mapping):
            now = getattr(model, key)
            of_now = now.model_dump() if isinstance(now, Section) else {}
            value = getattr(TrainerModelConfig.model_validate({key: {**of_now, **value}}), key)
        changes[key] = value
    resize = request.resize.model_copy(update={"layouts": request.listed_beside(fit.dims)})
    update = {"model": model.model_copy(update=changes), "resize": resize}
    if isinstance(config, RLConfig):
        update = {"trainer": config.trainer.model_copy(update=update)}
    return config.model_copy(update=update)


def _exactly(number: float) -> str:
    """Return it without a rounding: what is read back has to hold what fits."""
    short = f"{number:.6g}"
    return short if float(short) == number else repr(number)


def _changes(fit: TrainingFit, model: TrainerModelConfig) -> dict[str, object]:
    """Values of `trainer.model` that make the fit, but for those that the config has already. Of a table that the
    config has, too, those are left out that are the same there."""
    own = TrainerModelConfig()
    wanted: dict[str, object] = {axis: getattr(fit.dims, axis) for axis in AXES}
    wanted |= {key: getattr(own, key) for key, _ in KNOBS if key != "fused_lm_head_token_chunk_size"} | {**fit.settings}
    changes: dict[str, object] = {}
    for key, value in wanted.items():
        now = getattr(model, key)
        if isinstance(value, Mapping) and isinstance(now, Section):
            values = type(now).model_validate(value).model_dump()
            value = {name: each for name, each in values.items() if each != getattr(now, name)}
            if not value:
                continue
        if value != now:
            changes[key] = value
    return changes


def why_nothing_fits(request: FitRequest) -> str:
    """Return what a slot needs at least, and what would have to be."""
    spec, memory, asked = request.spec, request.memory, request.asked
    if refused := [_refused(fit, request) for fit in _all_that_fit(request, request.host_memory)]:
        return f"There would be memory, but the config excludes every layout that has it: {refused[0]}."
    if fits := find_fits(request, host_memory=None):
        fit = min(fits, key=lambda each: each.use.host.total)
        return (
            f"With {in_words(fit.dims) or 'one slot'} and {_in_words(fit.settings)} a GPU's own memory suffices, but "
            f"it takes {gib(fit.use.host.total)} GiB of host memory ({fit.use.host.in_words()}), and has "
            f"{gib(request.host_memory)} GiB: write a larger --host-memory if the machine has it, or take more GPUs."
        )
    layouts = possible_layouts(spec, request.gpus, asked.cp_style, asked.num_runs)
    least = min(layouts, key=lambda dims: memory.use(spec, dims, asked).device.total, default=None)
    if least is None:
        return f"The model has no layout on {many(request.gpus, 'GPU')}: write another number."
    use = memory.use(spec, least, asked).device
    found = relief(spec, asked, least, memory, built_keys())
    advice = relief_in_words(found, memory, f"{model_section(request.config)[1]}model.")
    return (
        f"A slot would need at least {gib(use.total)} GiB ({use.in_words()}) and has {gib(memory.room_bytes)} GiB: "
        f"{advice}."
    )


def _in_words(settings: Mapping[str, object]) -> str:
    """ "ac and ac_offloading" of the knobs among the settings."""
    knobs = [key for key, _ in KNOBS if key in settings]
    return " and ".join(filter(None, (", ".join(knobs[:-1]), *knobs[-1:]))) or "no knob"


def as_json(fit: TrainingFit, request: FitRequest) -> dict[str, Any]:
    """Return the fit as plain values."""
    return {
        "layout": asdict(fit.dims),
        "settings": dict(fit.settings),
        "step_s": fit.time.step_s,
        "time": asdict(fit.time),
        "device_bytes": fit.use.device.named(),
        "host_bytes": fit.use.host.named(),
        "moment": fit.use.moment,
        "toml": toml(fit, request),
    }


def _deployment(request: FitRequest) -> list[str]:
    """Return lines that give the trainer so many slots."""
    gpus, deployment = request.gpus, request.config.deployment
    if request.config.cluster.component_placement is not None:
        return [f"# cluster.component_placement says who has which slots: give actor {gpus} of them"]
    if isinstance(deployment, MultiNodeDeployment | MultiNodeTrainDeployment):
        return [f"# deployment is of several nodes: give the trainer {gpus} GPUs"]
    of_rl, per_node = isinstance(deployment, SingleNodeDeployment), request.slots_per_node
    if per_node is not None and gpus % per_node:
        return [
            f"# {gpus} GPUs are no whole nodes of {per_node}: cluster.component_placement gives actor so many of them"
        ]
    if per_node is not None:
        name, num_infer = "num_nodes", 0
        if isinstance(deployment, SingleNodeDeployment):
            name, num_infer = "num_train_nodes", -(-deployment.num_infer_gpus // per_node)
        lines = [
            "[deployment]",
            'type = "multi_node"',
            f"{name} = {-(-gpus // per_node)}",
            f"gpus_per_node = {per_node}",
        ]
        return [*lines, f"num_infer_nodes = {num_infer}"] if of_rl else lines
    needed = gpus + (deployment.num_infer_gpus if isinstance(deployment, SingleNodeDeployment) else 0)
    lines = ["[deployment]", f"{'num_train_gpus' if of_rl else 'num_gpus'} = {gpus}"]
    return [*lines, f"gpus_per_node = {needed}"] if needed > deployment.gpus_per_node else lines
