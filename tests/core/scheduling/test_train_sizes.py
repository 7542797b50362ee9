"""What becomes of orders that would give the trainer a number of slots on which it has no layout."""

from dataclasses import replace

import pytest

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import LayoutRules
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.costs.train_sizes import TrainSizes, fitted
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.core.scheduling.orders import roles_after
from ductile.core.scheduling.policies.model import Model
from ductile.core.scheduling.policies.rules import Home, Rules
from tests.core.scheduling.scenes import COSTS, scene

TRAIN, GENERATE = ("train",), ("generate",)


def tp_2(state, **limits):
    rules, layout = LayoutRules(asked=AskedLayout(tp=2)), ParallelLayout.of(state.trainer.layout.slots, tp=2)
    state = replace(state, limits=replace(state.limits, **limits))
    return replace(state, trainer=replace(state.trainer, layout=layout, rules=rules))


def test_the_sizes_are_those_of_layouts_above_the_floor_and_that_of_now():
    sizes = TrainSizes(tp_2(scene(), min_train=4))
    assert [number for number in range(8) if number in sizes] == [2, 4, 6]
    assert [sizes.at_most(number) for number in (1, 2, 3, 5, 9)] == [0, 2, 2, 4, 6]


@pytest.mark.parametrize(
    ("before", "wanted", "kept"),
    [
        ({}, {2: TRAIN, 3: TRAIN}, [2, 3]),
        ({}, {2: TRAIN, 3: TRAIN, 4: TRAIN}, [2, 3]),
        ({4: ()}, {2: TRAIN, 3: TRAIN, 4: TRAIN}, [2, 4]),
        ({}, {2: TRAIN}, []),
        ({2: TRAIN, 3: TRAIN}, {2: GENERATE}, []),
        ({2: TRAIN, 3: TRAIN}, {2: GENERATE, 4: TRAIN}, [2, 4]),
        ({2: TRAIN, 3: TRAIN}, {2: GENERATE, 3: GENERATE, 4: TRAIN}, [2, 3]),
        ({}, {3: (), 2: TRAIN}, [3]),
    ],
)
def test_as_many_roles_change_as_leave_the_trainer_a_layout(before, wanted, kept):
    assert sorted(fitted(tp_2(scene(roles=before)), wanted)) == kept


def test_slots_of_one_generator_stay_together():
    state = tp_2(scene({"actor": "0-1", "rollout": "2-7"}, limits=Limits(slots_per_generator=3)))
    assert sorted(fitted(state, dict.fromkeys(range(2, 8), TRAIN))) == [2, 3, 4, 5, 6, 7]
    assert fitted(state, dict.fromkeys((2, 3, 4), TRAIN)) == {}


@pytest.mark.parametrize("policy", [Rules(), Model()], ids=repr)
@pytest.mark.parametrize(("rollout", "expected"), [("2-5", 6), ("2-4", 4)])
def test_at_the_end_of_a_step_the_trainer_gets_as_many_slots_as_it_can_have(policy, rollout, expected):
    """The slot that is left keeps its generator."""
    batch = {"ready": 64, "ready_tokens": 60_000, "trained": 8, "asked": True}
    state = tp_2(scene({"actor": "0-1", "rollout": rollout}, costs=COSTS, limits=Limits(may_share=False), **batch))
    after = roles_after(state, policy.decide(state))
    assert sum("train" in roles for roles in after.values()) == expected
    assert sum(roles == GENERATE for roles in after.values()) == len(after) - expected


def test_a_way_home_that_is_blocked_for_one_slot_is_taken_when_it_is_not():
    roles = {2: TRAIN, 3: TRAIN}
    blocked, free = (tp_2(scene(roles=roles, not_ready=slots)) for slots in ((3,), ()))
    assert Home().decide(blocked).orders == ()
    assert [move.slot for move in Home().decide(free).moves] == [2, 3]


def test_a_scorer_that_trains_is_called_back_with_a_slot_that_leaves_the_trainer_a_layout():
    state = scene({"actor": "0-1", "rollout": "2-4", "inference": "5"}, roles={4: TRAIN, 5: TRAIN}, to_score=3)
    assert [move.slot for move in Model().decide(tp_2(state, min_score=1)).moves] == [4, 5]
