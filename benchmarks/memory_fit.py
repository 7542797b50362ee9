"""Times of a step in layouts of four slots: as `memory.py` measures them, and as `ductile fit` expects them.

What is expected follows from steps of one slot and of two (`BESIDE`): how fast a slot is, how fast its links are, and
what an axis costs. Nothing that four slots do goes into it. Where there are fewer cores than slots, these share them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Protocol

from ductile.core.layout.geometry.parallel_layout import ParallelDims, ParallelLayout, RankShape
from ductile.core.layout.geometry.pipeline_schedule import PipelineShape
from ductile.core.layout.memory.options import MemoryOptions
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.scheduling.costs.layout_time import HostSpeeds, SlotSpeed, layout_time
from memory_cases import MICRO_BATCHES, ONE, TWO, Case, layouts
from provenance import num_cores

BESIDE: Mapping[str, Case] = {
    "one": ONE,
    "dp_shard": TWO,
    **{axis: replace(ONE, sizes={axis: 2}) for axis in ("tp", "cp", "pp")},
}
"""Cases of one slot, and of two along an axis, which the expected times rest on."""
SHORTEST_S = 0.01
"""Seconds that collectives of a step are taken to need at least, where two measured times say less."""
MEMORY_BYTES_PER_S = 5e9
"""Bytes that a core reads and writes in a second in the optimizer's step: about what one channel gives it."""


class Step(Protocol):
    @property
    def step_s(self) -> float: ...


class Steps(Protocol):
    """Cases that are measured (`memory.Measured`)."""

    def of(self, case: Case) -> Step: ...
    def spec(self, case: Case) -> ModelSpec: ...
    def layout(self, case: Case) -> ParallelLayout: ...
    def options(self, case: Case) -> MemoryOptions: ...


def fit_of(steps: Steps, had: Sequence[Case]) -> dict[str, Any]:
    """Measured and expected times of the layouts among the cases that were measured, and how many times the best of
    them the best expected one takes; nothing where one of `BESIDE` is not among them."""
    names = {case.name for case in had}
    if not {case.name for case in BESIDE.values()} <= names:
        return {"layouts": [], "ratio": None}
    told = [
        {
            "layout": case.sizes,
            "step_s": steps.of(case).step_s,
            "predicted_step_s": expected_s(steps, case, speed_of(steps, case.num_slots / num_cores())),
        }
        for case in layouts()
        if case.name in names
    ]
    chosen = min(told, key=lambda each: each["predicted_step_s"], default=None)
    ratio = chosen["step_s"] / min(each["step_s"] for each in told) if chosen else None
    beside = {name: steps.of(case).step_s for name, case in BESIDE.items()}
    return {"layouts": told, "ratio": ratio, "measured_beside_s": beside}


def expected_s(steps: Steps, case: Case, speed: SlotSpeed) -> float:
    dims = steps.layout(case).dims
    return layout_time(
        steps.spec(case), dims, steps.options(case), MICRO_BATCHES * dims.num_data_parallel, speed
    ).step_s


def speed_of(steps: Steps, slots_per_core: float) -> SlotSpeed:
    """Speed of slots of which so many share a core."""
    shared, alone_s = max(1.0, slots_per_core), steps.of(ONE).step_s
    unhindered = SlotSpeed(tokens_per_s=1.0, machine=HostSpeeds(link_bytes_per_s=1.0), overlaps=False)
    moved_bytes = _collectives_s(steps, TWO, unhindered)
    link = moved_bytes / max(SHORTEST_S, steps.of(TWO).step_s - alone_s)
    return SlotSpeed(
        tokens_per_s=MICRO_BATCHES * ONE.seq_len / alone_s / shared,
        machine=HostSpeeds(link_bytes_per_s=link / shared, memory_bytes_per_s=MEMORY_BYTES_PER_S / shared),
        overlaps=False,
        slots_per_core=shared,
        rank_speeds=_rank_speeds(steps, alone_s, link),
    )


def _rank_speeds(steps: Steps, alone_s: float, link: float) -> tuple[tuple[RankShape, float], ...]:
    """Speed of each shape of rank over that of one slot, in a full message, if every further slot along an axis costs
    what the second one did."""
    speed = SlotSpeed(tokens_per_s=1.0, machine=HostSpeeds(link_bytes_per_s=link), overlaps=False)
    costs: dict[str, float] = {}
    for axis in ("tp", "cp", "pp"):
        case = BESIDE[axis]
        bubble = PipelineShape(case.sizes.get("pp", 1)).bubble(MICRO_BATCHES)
        working_s = (steps.of(case).step_s - _collectives_s(steps, case, speed)) * (1 - bubble)
        costs[axis] = max(0.0, working_s / (alone_s / 2) - 1)
    shapes = {steps.layout(case).dims.rank_shape for case in layouts()} | {ParallelDims().rank_shape}
    return tuple((shape, _rank_speed(shape, costs)) for shape in sorted(shapes))


def _rank_speed(shape: RankShape, costs: Mapping[str, float]) -> float:
    pipeline = PipelineShape(shape.pp)
    lost = prod(1 + costs[axis] * (size - 1) for axis, size in shape._asdict().items())
    return prod(shape) * (1 - pipeline.bubble(pipeline.full_message)) / lost


def _collectives_s(steps: Steps, case: Case, speed: SlotSpeed) -> float:
    dims = steps.layout(case).dims
    num_samples = MICRO_BATCHES * dims.num_data_parallel
    return layout_time(steps.spec(case), dims, steps.options(case), num_samples, speed).collectives_s
