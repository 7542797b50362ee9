"""How fast the trainer would be on each number of slots, in the layout that it would have there."""

from bisect import bisect_right
from functools import lru_cache

import numpy as np

from ductile.core.layout.holdings import Ints
from ductile.core.layout.layout_rules import LayoutRules, dims_allowed
from ductile.core.layout.parallel_layout import ParallelDims, RankShape
from ductile.core.scheduling.arithmetic import FloatArray
from ductile.core.scheduling.cost import TrainSpeed
from ductile.core.scheduling.state import ClusterState


class TrainRates:
    """Numbers of slots go in as whole floats, one for each of the plans that are compared. Of a number on which the
    trainer has no layout it takes as many as it can; fewer than it can have at all count as their share of the
    fewest."""

    def __init__(self, train: TrainSpeed, rules: LayoutRules, num_slots: int, now: ParallelDims | None = None) -> None:
        """num_slots: the most that will be asked about. now: sizes that the trainer has, which it may have anyway."""
        num_ranks, shapes, which, share = _by_slots(rules, num_slots, now)
        speeds = np.array([train.rank_speed(shape) for shape in shapes])
        self._num_ranks = num_ranks * share
        self._tokens_per_s = train.of(num_ranks, speeds[which]) * share

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
    return TrainRates(state.speeds.train, state.trainer.rules, most, state.trainer.layout.dims)


@lru_cache(maxsize=16)
def _by_slots(
    rules: LayoutRules, num_slots: int, now: ParallelDims | None
) -> tuple[FloatArray, tuple[RankShape, ...], Ints, FloatArray]:
    """Arrays by number of slots, 0 first: data-parallel ranks; all shapes that these have anywhere, and which of
    them they have; the share of all this that such a number has."""
    dims = dict(dims_allowed(num_slots, rules))
    if now is not None:
        dims.setdefault(now.num_slots, now)
    sizes = sorted(dims)
    taken = [dims[sizes[max(0, bisect_right(sizes, most) - 1)]] for most in range(num_slots + 1)]
    shapes = tuple(sorted({each.rank_shape for each in taken}))
    places = {shape: place for place, shape in enumerate(shapes)}
    num_ranks = np.array([float(each.num_data_parallel) for each in taken])
    which = np.array([places[each.rank_shape] for each in taken], np.int64)
    return num_ranks, shapes, which, np.minimum(1.0, np.arange(num_slots + 1) / sizes[0])
