"""How fast the trainer would be on each number of slots, in the layout that it would have there."""

from functools import lru_cache

import numpy as np

from ductile.core.layout.holdings import Ints
from ductile.core.layout.layout_rules import LayoutRules, choose_dims
from ductile.core.layout.parallel_layout import RankShape
from ductile.core.scheduling.arithmetic import FloatArray
from ductile.core.scheduling.cost import TrainSpeed
from ductile.core.scheduling.state import ClusterState


class TrainRates:
    """Numbers of slots go in as whole floats, one for each of the plans that are compared."""

    def __init__(self, train: TrainSpeed, rules: LayoutRules, num_slots: int) -> None:
        """num_slots: the most that will be asked about."""
        num_ranks, shapes, which = _by_slots(rules, num_slots)
        speeds = np.array([train.rank_speed(shape) for shape in shapes])
        self._num_ranks = num_ranks
        self._tokens_per_s = train.of(num_ranks, speeds[which])

    def num_ranks(self, slots: FloatArray) -> FloatArray:
        """Data-parallel ranks: as many micro-batches run at a time."""
        return self._num_ranks[slots.astype(np.int64)]

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
def _by_slots(rules: LayoutRules, num_slots: int) -> tuple[FloatArray, tuple[RankShape, ...], Ints]:
    """Ranks on 0, 1, ... slots: how many; all shapes that they have anywhere; which of these they have."""
    dims = choose_dims(num_slots, rules)
    shapes = tuple(sorted({each.rank_shape for each in dims}))
    places = {shape: place for place, shape in enumerate(shapes)}
    num_ranks = np.array([0.0, *(float(each.num_data_parallel) for each in dims)])
    return num_ranks, shapes, np.array([0, *(places[each.rank_shape] for each in dims)], np.int64)
