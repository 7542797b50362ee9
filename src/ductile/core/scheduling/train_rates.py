"""How fast the trainer would be on each number of slots, in the layout that it would have there."""

from functools import lru_cache

import numpy as np

from ductile.core.layout.holdings import Ints
from ductile.core.layout.layout_rules import LayoutRules, choose_layout
from ductile.core.layout.parallel_layout import RankShape
from ductile.core.layout.pipeline import PipelineShape
from ductile.core.scheduling.arithmetic import FloatArray
from ductile.core.scheduling.cost import TrainSpeed
from ductile.core.scheduling.state import ClusterState


class TrainRates:
    """Numbers of slots go in as whole floats, one for each of the plans that are compared."""

    def __init__(self, train: TrainSpeed, rules: LayoutRules, num_slots: int) -> None:
        """num_slots: the most that will be asked about."""
        num_ranks, num_micro_batches, shapes, which = _by_slots(rules, num_slots)
        speeds = np.array([train.rank_speed(shape) for shape in shapes])
        self._num_ranks, self._num_micro_batches = num_ranks, num_micro_batches
        self._tokens_per_s = train.of(num_ranks, speeds[which])

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
    return TrainRates(state.speeds.train, state.trainer.rules, most)


@lru_cache(maxsize=16)
def _by_slots(rules: LayoutRules, num_slots: int) -> tuple[FloatArray, FloatArray, tuple[RankShape, ...], Ints]:
    """Ranks on 0, 1, ... slots: how many; their micro-batches in a full message; all shapes that they have anywhere;
    which of these they have."""
    layouts = [choose_layout(number, rules).layout for number in range(1, num_slots + 1)]
    shapes = tuple(sorted({layout.dims.rank_shape for layout in layouts}))
    places = {shape: place for place, shape in enumerate(shapes)}
    num_ranks = np.array([0.0, *(float(layout.num_data_parallel) for layout in layouts)])
    per_rank = np.array([0.0, *(float(PipelineShape.of(layout).full_message) for layout in layouts)])
    which = np.array([0, *(places[layout.dims.rank_shape] for layout in layouts)], np.int64)
    return num_ranks, num_ranks * per_rank, shapes, which
