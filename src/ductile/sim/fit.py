"""What `ductile fit` finds, as text, as TOML and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, cast

from ductile.config.checks.on_disk import model_findings
from ductile.config.checks.trainer_layout import (
    TrainingConfig,
    asked_layout,
    built_keys,
    model_section,
    model_spec,
    num_samples,
    slot_memory,
)
from ductile.config.schema.cluster import MultiNodeDeployment, MultiNodeTrainDeployment, SingleNodeDeployment
from ductile.core.instances.placement import many
from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_text import in_words
from ductile.core.layout.choice.memory_levers import in_words as relief_in_words
from ductile.core.layout.choice.memory_levers import relief, spelled
from ductile.core.layout.choice.possible_layouts import possible_layouts
from ductile.core.layout.choice.slot_memory import SlotMemory
from ductile.core.layout.memory.parts import GIB, gib
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.scheduling.costs.layout_time import SlotSpeed
from ductile.core.scheduling.layout_search import TrainingFit, best_fits

ASSUMED_SAMPLES = 64
"""Samples of an optimizer step where the config does not say how many."""


@dataclass(frozen=True)
class FitRequest:
    """What is asked. Its properties raise ValueError for what cannot be reckoned with."""

    config: TrainingConfig
    gpus: int
    gpu_memory: int
    """Bytes of each."""
    gpu: str
    """Name whose peak is reckoned with."""
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
    def memory(self) -> SlotMemory:
        """Room of a slot of its own on such a GPU."""
        device = {"device_memory_gib": self.gpu_memory / GIB, "slots_per_device": 1}
        cluster = self.config.cluster.model_copy(update=device)
        found = slot_memory(self.config.model_copy(update={"cluster": cluster}))
        if found is None:
            raise ValueError("what this optimizer keeps is not known; use adamw or sgd")
        return found

    @cached_property
    def speed(self) -> SlotSpeed:
        if self.tokens_per_s is not None:
            return SlotSpeed(tokens_per_s=self.tokens_per_s)
        if (found := SlotSpeed.of_device(self.gpu)) is not None:
            return found
        raise ValueError(f"--gpu {self.gpu}: its peak is not known; write H100, H200 or A100, or --tokens-per-s")

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
        gpus = f"{many(self.gpus, 'GPU')} of {self.gpu_memory / GIB:.4g} GiB ({whose})"
        steps = f"steps of {many(self.num_samples, 'sample')} of {self.asked.seq_len:,} tokens"
        return f"{self.spec.num_parameters / 1e9:.3g}B parameters on {gpus}: {steps}"


def find_fits(request: FitRequest) -> list[TrainingFit]:
    """Return the best way to train for each layout that fits, the fastest first."""
    spec, memory, speed = request.spec, request.memory, request.speed
    samples, host = request.num_samples, request.host_memory
    return best_fits(spec, request.gpus, request.asked, memory, samples, speed, built_keys(), host)


def table(fits: Sequence[TrainingFit]) -> str:
    """Lines for a person: predicted times and bytes."""
    rows = [f"{'':4}{'step':>10}{'GiB':>8}{'host':>8}  {'layout':36}parts of the memory"]
    for number, fit in enumerate(fits, 1):
        device, host = fit.use.device, fit.use.host
        rows.append(
            f"{f'#{number}':4}{fit.time.step_s:>8.3g} s{gib(device.total):>8}{gib(host.total):>8}  "
            f"{in_words(fit.dims) or 'one slot':36}{device.in_words()}"
        )
    return "\n".join(rows)


def toml(fit: TrainingFit, request: FitRequest) -> str:
    """What to lay over the config, so that it trains so."""
    _, root = model_section(request.config)
    section = f"{root}model"
    plain = {key: value for key, value in fit.settings.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in fit.settings.items() if isinstance(value, Mapping)}
    lines = ["[cluster]", f"device_memory_gib = {request.gpu_memory / GIB:.6g}", "", *_deployment(request)]
    if plain:
        lines += ["", f"[{section}]", *(f"{key} = {spelled(value)}" for key, value in plain.items())]
    for key, values in tables.items():
        written = cast("Mapping[str, object]", values)
        lines += ["", f"[{section}.{key}]", *(f"{name} = {spelled(value)}" for name, value in written.items())]
    return "\n".join(lines)


def why_nothing_fits(request: FitRequest) -> str:
    """What a slot needs at least, and what would have to be."""
    spec, memory, asked = request.spec, request.memory, request.asked
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


def as_json(fit: TrainingFit, request: FitRequest) -> dict[str, Any]:
    """The fit as plain values."""
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
    """Lines that give the trainer so many slots."""
    gpus, deployment = request.gpus, request.config.deployment
    if request.config.cluster.component_placement is not None:
        return [f"# cluster.component_placement says who has which slots: give actor {gpus} of them"]
    if isinstance(deployment, MultiNodeDeployment | MultiNodeTrainDeployment):
        return [f"# deployment is of several nodes: give the trainer {gpus} GPUs"]
    of_rl = isinstance(deployment, SingleNodeDeployment)
    needed = gpus + (deployment.num_infer_gpus if isinstance(deployment, SingleNodeDeployment) else 0)
    lines = ["[deployment]", f"{'num_train_gpus' if of_rl else 'num_gpus'} = {gpus}"]
    return [*lines, f"gpus_per_node = {needed}"] if needed > deployment.gpus_per_node else lines
