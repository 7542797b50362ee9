"""Speeds of the trainer by number of slots, in the layout that it has there."""

from dataclasses import replace

import numpy as np
import pytest

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import NO_RULES, LayoutRules
from ductile.core.layout.geometry.parallel_layout import RankShape
from ductile.core.scheduling.costs.cost import TrainSpeed
from ductile.core.scheduling.costs.train_rates import TrainRates
from ductile.core.scheduling.policies.model import Model
from tests.core.scheduling.scenes import COSTS, SPEEDS, scene

TRAIN = TrainSpeed(1000, overhead=0.02)


def test_slots_are_ranks_where_there_is_data_parallelism_alone():
    slots = np.arange(9.0)
    rates = TrainRates(TRAIN, NO_RULES, 8)
    assert rates.num_ranks(slots).tolist() == slots.tolist()
    assert rates.tokens_per_s(slots).tolist() == TRAIN.of(slots).tolist()
    assert rates.tokens_per_s_on(0) == 0.0


def test_slots_of_one_rank_are_as_fast_as_their_layout():
    rules = LayoutRules(asked=AskedLayout(tp=2), listed=("pp=2,tp=2",))
    rates = TrainRates(TRAIN, rules, 6)
    assert rates.num_ranks(np.arange(7.0)).tolist() == [0, 0.5, 1, 1, 1, 1, 3]
    tp2, pp2_tp2, three = (
        TRAIN.of(number, TRAIN.rank_speed(RankShape(pp=pp, tp=2))) for number, pp in ((1, 1), (1, 2), (3, 1))
    )
    expected = [0, tp2 / 2, tp2, tp2, pp2_tp2, pp2_tp2, three]  # of 3 and 5 slots one has nothing to do
    assert rates.tokens_per_s(np.arange(7.0)).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("tp2_speed", "moved"), [(1.9, [2, 3, 4, 5]), (0.2, [])])
def test_a_policy_reckons_with_the_layout_that_it_would_get(tp2_speed, moved):
    """Nothing is left to generate: all slots train what is left, unless six of them, in the layout that is listed for
    six, are slower than the two that train now."""
    speeds = replace(SPEEDS, train=replace(SPEEDS.train, rank_speeds=((RankShape(tp=2), tp2_speed),)))
    state = scene(speeds=speeds, costs=COSTS, ready=64, ready_tokens=60_000)
    rules = LayoutRules(listed=("dp_shard=3,tp=2",))
    state = replace(state, trainer=replace(state.trainer, rules=rules))
    assert sorted(move.slot for move in Model().decide(state).moves) == moved
