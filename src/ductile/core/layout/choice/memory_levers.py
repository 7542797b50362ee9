"""What to write in a config so that training takes less memory: `relief`, the cheapest first.

    relief(spec, asked, dims, memory)      [Relief({"optim_cpu_offload": True}, needed_bytes=8 GiB)]

| lever | what it costs |
|---|---|
| `fused_lm_head_token_chunk_size` | more and smaller products |
| `ac.mode = "selective"` | what is done element by element, once more |
| `optim_cpu_offload` | the optimizer's state crosses to the device and back, once a step |
| `ac.mode = "full"` | a third more computing |
| `ac_offloading` | activations cross to host memory and back |
| `reshard_after_forward` | every layer's weights are gathered once more |
| larger `tp`, `cp`, `pp` | messages in every layer, or stages that wait |
| `fsdp_cpu_offload` | weights and gradients cross in every micro-batch, and the optimizer runs on a CPU |
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.possible_layouts import possible_layouts
from ductile.core.layout.choice.slot_memory import SlotMemory
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.memory.options import Checkpointing, MemoryOptions
from ductile.core.layout.memory.parts import gib
from ductile.core.layout.memory.predict import predict
from ductile.core.layout.model.spec import ModelSpec

SMALL_CHUNK = 1024
"""Tokens whose logits exist at a time, where the head is to take less."""
IN_FLIGHT = 5
"""Activations that are offloaded at a time, as the config has it by itself."""
MOST_ALONE = 3
"""Levers that are named which each suffice alone."""
WORTH = 0.98
"""What is needed with a lever, as a share of what is needed without: a lever that saves less is not named."""

AXES = ("pp", "dp_replicate", "cp", "tp")
"""Axes whose size a config has."""

TomlValue = bool | int | str


@dataclass(frozen=True, slots=True)
class Relief:
    """Settings that make training take less."""

    settings: Mapping[str, TomlValue]
    """Values by key of `trainer.model`."""
    needed_bytes: int
    """Bytes that a slot needs with them."""

    def sentence(self, root: str) -> str:
        """ "trainer.model.optim_cpu_offload = true makes it 8 GiB". root: what stands before a key."""
        written = [f"{root}{key} = {spelled(value)}" for key, value in self.settings.items()]
        makes = "makes it" if len(written) == 1 else "together make it"
        return f"{' and '.join(written)} {makes} {gib(self.needed_bytes)} GiB"


@dataclass(frozen=True, slots=True)
class _State:
    """A way to train, and the settings that have led to it."""

    options: MemoryOptions
    dims: ParallelDims
    settings: Mapping[str, TomlValue] = field(default_factory=dict[str, TomlValue])

    def needed(self, spec: ModelSpec) -> int:
        return predict(spec, self.dims, self.options).device.total

    def changed(self, key: str, value: TomlValue, **options: object) -> "_State":
        return _State(replace(self.options, **options), self.dims, {**self.settings, key: value})  # pyright: ignore

    def laid_out(self, dims: ParallelDims, axis: str) -> "_State":
        return _State(self.options, dims, {**self.settings, axis: getattr(dims, axis)})


Lever = Callable[[_State, ModelSpec], Iterator[_State]]
"""Function of a way to train that yields those that take less, by one setting; the cheapest first."""


def relief(
    spec: ModelSpec,
    asked: AskedLayout,
    dims: ParallelDims,
    memory: SlotMemory,
    built: Collection[str] | None = None,
) -> list[Relief]:
    """Return what would make it fit: up to `MOST_ALONE` settings each of which suffices alone, the cheapest first; or
    one set of several; or the one that takes least, where nothing suffices. Where `dims` are not those that are asked
    for, the settings that make them are among each.

    built: keys of `trainer.model` that may be named; None: all.
    """
    levers = [lever for key, lever in LEVERS if built is None or key in built]
    laid_out = {axis: getattr(dims, axis) for axis in AXES if getattr(asked, axis) not in ("auto", getattr(dims, axis))}
    begin = state = _State(memory.options_of(asked), dims, laid_out)
    alone = [found for lever in levers if (found := _first_that_fits(lever, state, spec, memory))]
    if alone:
        return [Relief(each.settings, each.needed(spec)) for each in alone[:MOST_ALONE]]
    for lever in levers:
        before = state.needed(spec)
        better = min(lever(state, spec), key=lambda each: each.needed(spec), default=None)
        if better is None or better.needed(spec) > WORTH * before:
            continue
        state = _first_that_fits(lever, state, spec, memory) or better
        if not memory.missing(state.needed(spec)):
            break
    return [] if state is begin else [Relief(state.settings, state.needed(spec))]


def in_words(found: list[Relief], memory: SlotMemory, root: str) -> str:
    """The sentence that goes on after what is needed."""
    if not found:
        return "no setting makes it less: take more slots, or a smaller model"
    said = ", or ".join(each.sentence(root) for each in found)
    short = memory.missing(min(each.needed_bytes for each in found))
    return f"{said}, which is still too much: take more slots" if short else said


def spelled(value: object) -> str:
    """Return a value as TOML has it: true, 5, "full", ["norm", "mlp"]; of None what a config reads as none."""
    if value is None:
        return '"None"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(spelled(each) for each in cast(list[object], value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _first_that_fits(lever: Lever, state: _State, spec: ModelSpec, memory: SlotMemory) -> _State | None:
    return next((each for each in lever(state, spec) if not memory.missing(each.needed(spec))), None)


def _head_chunk(state: _State, spec: ModelSpec) -> Iterator[_State]:
    chunk = state.options.head_chunk_tokens
    if chunk is None or chunk > SMALL_CHUNK:
        yield state.changed("fused_lm_head_token_chunk_size", SMALL_CHUNK, head_chunk_tokens=SMALL_CHUNK)


def _selective(state: _State, spec: ModelSpec) -> Iterator[_State]:
    excluded = state.options.pp_schedule == "zero_bubble" or "selective" in state.options.excluded
    if state.options.checkpointing is None and not excluded:
        yield state.changed("ac.mode", "selective", checkpointing=Checkpointing("selective"))


def _full(state: _State, spec: ModelSpec) -> Iterator[_State]:
    now = state.options.checkpointing
    if now is None or now.mode != "full" or now.freq > 1:
        yield state.changed("ac.mode", "full", checkpointing=Checkpointing("full"))


def _optimizer_offload(state: _State, spec: ModelSpec) -> Iterator[_State]:
    if not (state.options.optim_cpu_offload or state.options.fsdp_cpu_offload):
        yield state.changed("optim_cpu_offload", True, optim_cpu_offload=True)


def _activation_offload(state: _State, spec: ModelSpec) -> Iterator[_State]:
    now = state.options.offloaded_in_flight
    if now is None or now > 1:
        fewer = IN_FLIGHT if now is None else 1
        yield state.changed("ac_offloading.max_inflight_activations", fewer, offloaded_in_flight=fewer)


def _reshard(state: _State, spec: ModelSpec) -> Iterator[_State]:
    if not state.options.reshard_after_forward and state.dims.pp == 1:
        yield state.changed("reshard_after_forward", True, reshard_after_forward=True)


def _larger(axis: str) -> Lever:
    def lever(state: _State, spec: ModelSpec) -> Iterator[_State]:
        options, now = state.options, state.dims
        for dims in possible_layouts(spec, now.num_slots, options.cp_style, options.num_runs):
            others = [other for other in AXES if other != axis]
            is_alike = all(getattr(dims, other) == getattr(now, other) for other in others)
            if is_alike and getattr(dims, axis) > getattr(now, axis):
                yield state.laid_out(dims, axis)

    return lever


def _fsdp_offload(state: _State, spec: ModelSpec) -> Iterator[_State]:
    if not state.options.fsdp_cpu_offload and "fsdp_cpu_offload" not in state.options.excluded:
        less = replace(state, settings={key: it for key, it in state.settings.items() if key != "optim_cpu_offload"})
        yield less.changed("fsdp_cpu_offload", True, fsdp_cpu_offload=True, optim_cpu_offload=False)


LEVERS: tuple[tuple[str, Lever], ...] = (
    ("fused_lm_head_token_chunk_size", _head_chunk),
    ("ac", _selective),
    ("optim_cpu_offload", _optimizer_offload),
    ("ac", _full),
    ("ac_offloading", _activation_offload),
    ("reshard_after_forward", _reshard),
    ("tp", _larger("tp")),
    ("cp", _larger("cp")),
    ("pp", _larger("pp")),
    ("fsdp_cpu_offload", _fsdp_offload),
)
"""Levers by the key that they set, the cheapest first."""
