"""The layouts and knobs with which a model trains fastest, of those that fit: `best_fits`.

For each layout of the slots the knobs that save memory are tried from the fastest set of them to the slowest, and the
first set that fits is its best. So what comes out has no knob that its memory does not need.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.possible_layouts import possible_layouts
from ductile.core.layout.choice.slot_memory import SlotMemory
from ductile.core.layout.geometry.node_order import is_inside
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.memory.options import Checkpointing, MemoryOptions
from ductile.core.layout.memory.parts import SlotUse
from ductile.core.layout.memory.predict import predict
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.scheduling.costs.layout_time import LayoutTime, SlotSpeed, layout_time

MOST_TP = 8
"""Largest tp that is looked at: slots of one machine. Where nodes have fewer, no more than these."""
IN_FLIGHT = 5

FULL = {"mode": "full"}

Settings = Mapping[str, object]
"""Values of `trainer.model` by key; a table is a mapping."""


@dataclass(frozen=True, slots=True)
class TrainingFit:
    """A way to train that fits, and what is predicted of it."""

    dims: ParallelDims
    settings: Settings
    """Values of `trainer.model` that make it: of axes above 1, and of knobs that are not as a config has them by
    itself."""
    time: LayoutTime
    use: SlotUse


KNOBS: tuple[tuple[str, tuple[tuple[Settings, Mapping[str, object]], ...]], ...] = (
    (
        "ac",
        (
            ({}, {"checkpointing": None}),
            ({"ac": {"mode": "selective", "targets": ["norm"]}}, {"checkpointing": Checkpointing("selective")}),
            (
                {"ac": {"mode": "selective", "targets": ["norm", "mlp"]}},
                {"checkpointing": Checkpointing("selective", targets=("norm", "mlp"))},
            ),
            ({"ac": FULL}, {"checkpointing": Checkpointing("full")}),
        ),
    ),
    (
        "ac_offloading",
        (
            ({}, {"offloaded_in_flight": None}),
            ({"ac_offloading": {"max_inflight_activations": IN_FLIGHT}}, {"offloaded_in_flight": IN_FLIGHT}),
        ),
    ),
    (
        "optim_cpu_offload",
        (({}, {"optim_cpu_offload": False}), ({"optim_cpu_offload": True}, {"optim_cpu_offload": True})),
    ),
    ("fsdp_cpu_offload", (({}, {"fsdp_cpu_offload": False}), ({"fsdp_cpu_offload": True}, {"fsdp_cpu_offload": True}))),
    (
        "reshard_after_forward",
        (({}, {"reshard_after_forward": True}), ({"reshard_after_forward": False}, {"reshard_after_forward": False})),
    ),
    (
        "fused_lm_head_token_chunk_size",
        (({}, {}), ({"fused_lm_head_token_chunk_size": 1024}, {"head_chunk_tokens": 1024})),
    ),
)
"""Knobs by their key of `trainer.model`: values as a config has them, and as the memory is predicted with them. The
first value of each is the one that a config has by itself, and of the head's chunk what the asking config has."""


def best_fits(
    spec: ModelSpec,
    num_slots: int,
    asked: AskedLayout,
    memory: SlotMemory,
    num_samples: int,
    speed: SlotSpeed,
    built: Collection[str] | None = None,
    host_bytes: int | None = None,
) -> list[TrainingFit]:
    """Return the best way to train for each layout that fits, the fastest first.

    Args:
        asked: what is asked for besides sizes: `seq_len`, styles, schedules.
        memory: room of a slot, and the options that no knob changes.
        num_samples: samples of an optimizer step, each of `seq_len` tokens; its time depends on them.
        built: keys whose knobs may be used; None: all.
        host_bytes: host memory that a slot may take; None: any.
    """
    sets = _Sets(spec, memory.room_bytes, host_bytes, num_samples, speed, built)
    found: list[TrainingFit] = []
    for dims in possible_layouts(spec, num_slots, asked.cp_style, asked.num_runs, MOST_TP):
        if not is_inside(dims.tp, num_slots, speed.slots_per_node):
            continue
        best = sets.best(dims, memory.options_of(asked))
        if best is not None:
            found.append(best)
    return sorted(found, key=lambda fit: (fit.time.step_s, fit.use.device.total))


@dataclass(frozen=True, slots=True)
class _Sets:
    """Sets of knobs for one model, and what they have to fit."""

    spec: ModelSpec
    room_bytes: int
    host_bytes: int | None
    num_samples: int
    speed: SlotSpeed
    built: Collection[str] | None

    def best(self, dims: ParallelDims, options: MemoryOptions) -> TrainingFit | None:
        """Return the fastest that fits in a layout; None where none does."""
        timed = [
            (layout_time(self.spec, dims, each, self.num_samples, self.speed), settings, each)
            for settings, each in _knob_sets(dims, options, self.built)
        ]
        for time, settings, each in sorted(timed, key=lambda each: (each[0].step_s, len(each[1]))):
            use = predict(self.spec, dims, each)
            if use.device.total <= self.room_bytes and (self.host_bytes is None or use.host.total <= self.host_bytes):
                return TrainingFit(dims, {**_axes(dims), **settings}, time, use)
        return None


def _knob_sets(
    dims: ParallelDims, options: MemoryOptions, built: Collection[str] | None
) -> Iterator[tuple[Settings, MemoryOptions]]:
    """Sets of knobs that may be used with each other."""
    is_sharded = dims.dp_shard * dims.cp > 1 and dims.pp == 1
    knobs = [values for key, values in KNOBS if built is None or key in built]
    for chosen in product(*knobs):
        settings = {key: value for of_config, _ in chosen for key, value in of_config.items()}
        if "optim_cpu_offload" in settings and "fsdp_cpu_offload" in settings:
            continue
        if "reshard_after_forward" in settings and not is_sharded:
            continue
        checkpointing = settings.get("ac")
        no_selective = options.pp_schedule == "zero_bubble" or "selective" in options.excluded
        if no_selective and checkpointing and checkpointing != FULL:
            continue
        if "fsdp_cpu_offload" in settings and "fsdp_cpu_offload" in options.excluded:
            continue
        changes = {name: value for _, of_options in chosen for name, value in of_options.items()}
        yield settings, replace(options, **changes)  # pyright: ignore


def _axes(dims: ParallelDims) -> Settings:
    sizes = {"pp": dims.pp, "dp_replicate": dims.dp_replicate, "cp": dims.cp, "tp": dims.tp}
    return {axis: size for axis, size in sizes.items() if size > 1}
