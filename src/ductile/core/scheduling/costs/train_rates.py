"""How fast the trainer would be on each number of slots, in the layout that it would have there."""

from bisect import bisect_right
from functools import lru_cache

import numpy as np

from ductile.core.layout.choice.layout_rules import LayoutRules, choose_layout, dims_allowed
from ductile.core.layout.geometry.holdings import Ints
from ductile.core.layout.geometry.parallel_layout import ParallelLayout, RankShape
from ductile.core.layout.geometry.pipeline_schedule import PipelineShape
from ductile.core.scheduling.costs.arithmetic import FloatArray
from ductile.core.scheduling.costs.cost import TrainSpeed
from ductile.core.scheduling.facts.cluster_state import ClusterState


class TrainRates:
    """Numbers of slots go in as whole floats, one for each of the plans that are compared. Of a number on which the
    trainer has no layout it takes as many as it can; fewer than it can have at all count as their share of the
    fewest."""

    def __init__(
        self, train: TrainSpeed, rules: LayoutRules, num_slots: int, now: ParallelLayout | None = None
    ) -> None:
        """num_slots: the most that will be asked about. now: layout that the trainer has, which it may have anyway."""
        num_ranks, num_micro_batches, shapes, which, share = _by_slots(rules, num_slots, now)
        speeds = np.array([train.rank_speed(shape) for shape in shapes])
        self._num_ranks, self._num_micro_batches = num_ranks * share, num_micro_batches * share
        self._tokens_per_s = train.of(num_ranks, speeds[which]) * share

    def num_ranks(self, slots: FloatArray) -> FloatArray:
        """Data-parallel ranks."""
        return self._num_ranks[slots.astype(np.int64)]

    def num_micro_batches(self, slots: FloatArray) -> FloatArray:
        """Micro-batches that are given to the trainer at a time: a full message for each data-parallel rank."""
        return self._num_micro_batches[slots.astype(np.int64)]

    def tokens_per_s(self, slots: FloatArray) -> FloatArray:
        """Tokens that so many slots train on per second, when micro-steps are full; 0 for no slot."""
        return self._tokens_per_s[slots.astype(np.int64)]

    def tokens_per_s_on(self, num_slots: int) -> float:
        return float(self._tokens_per_s[num_slots])


def train_rates(state: ClusterState) -> TrainRates:
    """Rates of the trainer on up to all slots of the cluster."""
    most = max(len(state.slots), len(state.trainer.layout.slots))
    return TrainRates(state.speeds.train, state.trainer.rules, most, state.trainer.layout)


@lru_cache(maxsize=16)
def _by_slots(
    rules: LayoutRules, num_slots: int, now: ParallelLayout | None
) -> tuple[FloatArray, FloatArray, tuple[RankShape, ...], Ints, FloatArray]:
    """Arrays by number of slots, 0 first: data-parallel ranks; their micro-batches in a full message; all shapes that
    ranks have anywhere, and which of them they have; the share of all this that such a number has."""
    layouts = {number: choose_layout(number, rules).layout for number in dims_allowed(num_slots, rules)}
    if now is not None:
        layouts.setdefault(len(now.slots), now)
    sizes = sorted(layouts)
    taken = [layouts[sizes[max(0, bisect_right(sizes, most) - 1)]] for most in range(num_slots + 1)]
    shapes = tuple(sorted({layout.dims.rank_shape for layout in taken}))
    places = {shape: place for place, shape in enumerate(shapes)}
    num_ranks = np.array([float(layout.num_data_parallel) for layout in taken])
    per_rank = np.array([float(PipelineShape.of(layout).full_message) for layout in taken])
    which = np.array([places[layout.dims.rank_shape] for layout in taken], np.int64)
    return num_ranks, num_ranks * per_rank, shapes, which, np.minimum(1.0, np.arange(num_slots + 1) / sizes[0])
