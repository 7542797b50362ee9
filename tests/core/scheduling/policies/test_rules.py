from dataclasses import replace

import pytest

from ductile.core.scheduling.costs.cost import DecodeSpeed
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.core.scheduling.orders import roles_after, violations
from ductile.core.scheduling.policies.rules import Home, Rules
from tests.core.scheduling.scenes import COSTS, SPEEDS, id_on, scene


def kept(state, decision):
    """Slots by role afterwards, once it is clear that the decision is a legal one."""
    assert violations(state, decision) == []
    after = roles_after(state, decision)
    return {role: [slot for slot, roles in after.items() if role in roles] for role in ("train", "generate", "score")}


# Slots 0-1 train, 2-5 generate, 8 sequences each at most.
@pytest.mark.parametrize(
    ("running", "generators"),
    [
        ({2: [9] * 8, 3: [9] * 8, 4: [9] * 8, 5: [9] * 8}, [2, 3, 4, 5]),
        ({2: [9] * 7, 3: [9] * 8, 4: [9] * 2, 5: [9] * 8}, [2, 3, 4, 5]),
        ({2: [9] * 7, 3: [9] * 8, 4: [9], 5: [9] * 8}, [2, 3, 5]),
        ({2: [9] * 2, 3: [9] * 3, 4: [9] * 4, 5: [9] * 5}, [4, 5]),
        ({3: [9] * 8}, [3]),
        ({}, []),
    ],
)
def test_generators_that_the_rollouts_do_not_need_train(running, generators):
    state = scene(running=running, trained=10)
    after = kept(state, Rules().decide(state))
    assert after["generate"] == generators
    assert sorted(after["train"] + after["generate"]) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("per_sequence_s", "generators"), [(0.0, 1), (0.001, 1), (0.0025, 2), (0.005, 4), (0.1, 4)])
def test_a_generator_takes_on_what_does_not_double_its_decode_step(per_sequence_s, generators):
    """A step takes 10 ms and so much more for each sequence: eight are left."""
    speeds = replace(SPEEDS, decode=DecodeSpeed(0.01, per_sequence_s))
    state = scene(running={2: [9] * 2, 3: [9] * 2, 4: [9] * 2, 5: [9] * 2}, trained=10, speeds=speeds)
    assert len(kept(state, Rules().decide(state))["generate"]) == generators


def test_rollouts_that_have_not_started_need_generators_too():
    state = scene(running={2: [9]}, trained=10, to_start=9)
    assert len(kept(state, Rules().decide(state))["generate"]) == 2


def test_with_fewer_generators_than_the_rollouts_need_none_is_freed():
    state = scene({"actor": "0-1", "rollout": "2-3"}, running={2: [9] * 8, 3: [9] * 8}, trained=10, to_start=40)
    assert Rules().decide(state).orders == ()


def test_a_slot_of_a_scorer_that_has_lost_its_other_one_keeps_what_it_does():
    placement = {"actor": 0, "rollout": 1, "inference": "2-3"}
    limits = Limits(max_num_seqs=8, slots_per_scorer=2)
    whole = scene(placement, roles={2: ("train",), 3: ("train",)}, limits=limits, to_start=64)
    assert roles_after(whole, Home().decide(whole))[2] == ("score",)
    lacking = replace(whole, slots=whole.slots[:3])
    assert roles_after(lacking, Home().decide(lacking))[2] == ("train",)


def test_what_it_says_is_what_it_does():
    state = scene({"actor": 0, "rollout": "1-3"}, running={1: [9] * 6, 2: [5, 5, 5], 3: [9] * 5}, trained=10)
    decision = Rules().decide(state)
    assert decision.reason == (
        "slot 2 generate → train: 3 rollouts left, migrated to generator-1, generator-3; 14 rollouts to generate, "
        "2 generators needed"
    )
    assert {order.id for order in decision.migrations} == {"2/0", "2/1", "2/2"}
    alone = scene({"actor": 0, "rollout": "1-2"}, running={2: [9]}, trained=10)
    assert Rules().decide(alone).reason == "slot 1 generate → train; 1 rollout to generate, 1 generator needed"


def test_scorers_train_when_nothing_is_left_to_score():
    placement = {"actor": 0, "rollout": 1, "inference": 2}
    busy = scene(placement, running={}, trained=10, to_score=3)
    assert kept(busy, Rules().decide(busy)) == {"train": [0, 1], "generate": [], "score": [2]}
    done = scene(placement, roles={1: ("train",)}, trained=10, ready=54)
    assert kept(done, Rules().decide(done))["train"] == [0, 1, 2]


def test_slots_without_a_role_train_once_the_step_has_begun():
    state = scene({"actor": 0, "rollout": "1-2"}, roles={2: ()}, running={1: [9] * 8}, trained=1)
    assert kept(state, Rules().decide(state)) == {"train": [0, 2], "generate": [1], "score": []}


def test_everybody_goes_home_at_the_end_of_a_step():
    state = scene(roles={3: ("train",), 4: ("train",), 5: ("train",), 2: ("train",)}, trained=0, to_start=64)
    decision = Rules().decide(state)
    assert kept(state, decision) == {"train": [0, 1], "generate": [2, 3, 4, 5], "score": []}
    assert "returns" in decision.reason


def test_everybody_goes_home_late_when_a_change_was_still_under_way_at_the_end_of_the_step():
    """Nobody was asked before the new step's first micro-step; without generators it would have no rollouts."""
    away = {slot: ("train",) for slot in (2, 3, 4, 5)}
    state = scene(roles=away, trained=8, ready=8, to_start=48, asked=False)
    decision = Rules(pre_process=True).decide(state)
    assert kept(state, decision) == {"train": [0, 1], "generate": [2, 3, 4, 5], "score": []}
    assert not decision.hold_training, "training has begun"


@pytest.mark.parametrize(("ready", "held", "micro_steps"), [(64, False, 0.5), (0, False, 0), (64, True, 0)])
def test_a_resize_waits_for_the_micro_step_that_runs_when_it_is_prepared(ready, held, micro_steps):
    costs = replace(COSTS, prepare_s=0.7)
    state = scene(trained=0, ready=ready, ready_tokens=ready * 1000, held=held, costs=costs)
    assert state.resize_wait_s == pytest.approx(micro_steps * state.micro_step_s + 0.7)


def test_nothing_happens_inside_a_micro_step():
    state = scene(running={}, trained=10, at_boundary=False)
    assert Rules().decide(state).orders == ()


def test_slots_that_are_not_ready_are_left_alone():
    state = scene(running={2: [9] * 4}, trained=10, not_ready=[4])
    after = kept(state, Rules().decide(state))
    assert 4 in after["generate"]


def test_train_slots_generate_until_half_of_the_step_is_finished():
    early = scene(trained=0, ready=31, to_start=20, running={2: [1] * 8, 3: [1] * 5})
    decision = Rules(pre_process=True).decide(early)
    assert decision.hold_training
    assert kept(early, decision) == {"train": [0, 1], "generate": [0, 1, 2, 3, 4, 5], "score": []}
    lent = {0: ("train", "generate"), 1: ("train", "generate")}
    late = scene(roles=lent, held=True, trained=0, ready=32, running={0: [9] * 4, 1: [9] * 4, 2: [9] * 8, 3: [9] * 5})
    decision = Rules(pre_process=True).decide(late)
    assert not decision.hold_training
    assert kept(late, decision)["generate"] == [2, 3, 4, 5]
    assert {order.source for order in decision.migrations} == {id_on(0), id_on(1)}
    assert "training starts" in decision.reason


def test_without_memory_for_both_nothing_is_lent():
    state = scene(trained=0, to_start=64, limits=Limits(may_share=False))
    decision = Rules(pre_process=True).decide(state)
    assert decision.orders == ()
    assert not decision.hold_training, "nobody would generate instead"
    assert decision.reason == "training does not wait: no train slot has memory for a generator besides"


def test_where_train_slots_generate_by_configuration_training_waits_for_them():
    state = scene({"actor,rollout": "0-3"}, trained=0, to_start=64)
    decision = Rules(pre_process=True).decide(state)
    assert decision.hold_training
    assert "until half" in decision.reason


@pytest.mark.parametrize(
    ("num_updates", "trained", "waits"), [(1, 47, False), (1, 48, True), (4, 47, False), (4, 48, True), (2, 32, True)]
)
def test_the_last_part_of_the_batch_waits_for_all_slots(num_updates, trained, waits):
    rules = Rules(wait_before_last_iter=True)
    state = scene(running={2: [9] * 8}, trained=trained, ready=8, num_updates=num_updates)
    assert rules.decide(state).hold_training is waits
    unscored = scene(running={}, held=True, trained=trained, ready=8, to_score=56 - trained, num_updates=num_updates)
    decision = rules.decide(unscored)
    assert decision.hold_training is waits
    assert not waits or f"waits for the scores of {56 - trained} rollouts" in decision.reason
    done = scene(running={}, held=True, trained=trained, ready=64 - trained, num_updates=num_updates)
    decision = rules.decide(done)
    assert not decision.hold_training
    assert kept(done, decision)["train"] == [0, 1, 2, 3, 4, 5]


def test_shares_that_differ_are_waited_for_only_once_the_optimizer_step_before_is_trained():
    """Of seven groups of 8 the first of two optimizer steps has four: more are trained before the last one begins."""
    rules = Rules(wait_before_last_iter=True)
    state = scene(running={2: [9] * 8}, num_rollouts=56, group_size=8, trained=29, ready=3, num_updates=2)
    assert not rules.decide(state).hold_training
    state = scene(running={2: [9] * 8}, num_rollouts=56, group_size=8, trained=32, ready=8, num_updates=2)
    assert rules.decide(state).hold_training


def test_scorers_stay_while_finished_rollouts_still_wait_for_their_rewards():
    """Nothing is left to generate and nothing is there to score yet, but it will be."""
    state = scene({"actor": 0, "rollout": 1, "inference": 2}, trained=10, ready=50)
    assert kept(state, Rules().decide(state))["score"] == [2]
