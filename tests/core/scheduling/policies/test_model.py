"""What `model` does in situations that a reader can reckon through.

Decoding takes 10 ms a step and 1 ms a sequence, a slot trains 1,000 tokens a second, a sample has 200 or so.
"""

from dataclasses import replace

import pytest

from ductile.core.instances.instances import InstanceId, instance_on
from ductile.core.instances.placement import Placement
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.costs.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed
from ductile.core.scheduling.facts.cluster_state import (
    BatchProgress,
    ClusterState,
    Lengths,
    Limits,
    SlotState,
    TrainerState,
    Unfinished,
)
from ductile.core.scheduling.orders import Decision, roles_after, violations
from ductile.core.scheduling.policies.model import Model
from tests.core.scheduling.scenes import COSTS, id_on, scene

BOTH = ("train", "generate")
ALL_GENERATE = {slot: BOTH for slot in range(5)} | {5: ("generate",)}
"""Five slots hold the trainer's state beside their generators."""


def decide(state):
    decision = Model().decide(state)
    assert violations(state, decision) == []
    return decision


def late(**changed):
    """Three quarters of the step are finished; each slot still has one long rollout."""
    given = {"roles": ALL_GENERATE, "running": {slot: [300] for slot in range(6)}, "held": True}
    return scene(**{**given, "ready": 56, "ready_tokens": 56 * 300, "group_size": 2, **changed})


def test_at_the_start_of_a_step_all_slots_generate_and_training_waits():
    state = scene(to_start=64, group_size=2, limits=Limits(max_num_seqs=16))
    decision = decide(state)
    assert all("generate" in roles for roles in roles_after(state, decision).values())
    assert [slot for slot, roles in roles_after(state, decision).items() if "train" in roles] == [0, 1]
    assert decision.hold_training


def test_a_run_s_first_step_begins_on_all_slots_though_nothing_is_measured():
    state = replace(scene(to_start=64, group_size=2), knows_generation=False)
    decision = decide(state)
    assert roles_after(state, decision) == {slot: BOTH if slot < 2 else ("generate",) for slot in range(6)}
    assert decision.hold_training
    began = scene(roles=ALL_GENERATE, running={slot: [10] * 8 for slot in range(6)}, held=True)
    assert decide(replace(began, knows_generation=False)) == Decision(hold_training=True), "until it is measured"


@pytest.mark.parametrize(
    "changed",
    [
        {"limits": Limits(may_share=False)},
        {"to_start": 4},
        {"to_start": 20, "running": {slot: [10] for slot in range(2, 6)}},
    ],
    ids=["a train slot has no memory for a generator", "so few rollouts need no more generators", "the step has begun"],
)
def test_nothing_is_decided_before_generation_is_measured_where_more_generators_cannot_help(changed):
    state = replace(scene(**{"to_start": 64, "group_size": 2, **changed}), knows_generation=False)
    assert decide(state) == Decision()


def test_without_the_permission_a_run_s_first_step_begins_as_configured():
    state = replace(scene(to_start=64, group_size=2), knows_generation=False)
    assert Model(pre_process=False).decide(state) == Decision()


def test_train_slots_that_kept_their_generators_need_no_orders_to_generate():
    decision = decide(scene(roles=ALL_GENERATE, to_start=64, group_size=2, limits=Limits(max_num_seqs=16)))
    assert (decision.moves, decision.hold_training) == ((), True)


def test_without_the_permission_no_train_slot_generates_at_the_start_of_a_step():
    state = scene(to_start=64, group_size=2, limits=Limits(max_num_seqs=16))
    decision = Model(pre_process=False).decide(state)
    assert not decision.hold_training
    assert not any({"train", "generate"} <= {*roles} for roles in roles_after(state, decision).values())
    assert Model(wait_before_last_iter=False).decide(state) == decide(state), "that one is about the last part"


@pytest.mark.parametrize(("trained", "permission"), [(0, "pre_process"), (48, "wait_before_last_iter")])
def test_training_waits_for_what_its_slots_generate_where_that_is_permitted(trained, permission):
    """Four slots that all train and generate, as configured: four long completions are left."""
    running = {slot: [300] for slot in range(4)}
    state = scene({"actor,rollout": "0-3"}, running=running, trained=trained, ready=60 - trained, ready_tokens=4000)
    other = {"pre_process": "wait_before_last_iter", "wait_before_last_iter": "pre_process"}[permission]
    assert decide(state).hold_training
    assert Model(**{other: False}).decide(state).hold_training
    assert not Model(**{permission: False}).decide(state).hold_training
    assert decide(state).reason == "training waits while its slots generate"


def test_training_begins_without_a_resize_when_handing_off_is_enough():
    decision = decide(late())
    assert decision.moves == ()
    assert {order.source for order in decision.migrations} == {id_on(slot) for slot in range(5)}
    assert {order.target for order in decision.migrations} == {id_on(5)}
    assert not decision.hold_training


def test_a_trainer_that_waits_for_new_slots_begins_no_micro_step_before_it_has_them():
    state = late(roles={slot: BOTH for slot in range(6)})
    decision = decide(state)
    trainers = [slot for slot, roles in roles_after(state, decision).items() if "train" in roles]
    assert len(trainers) < 6
    assert decision.hold_training


def test_slots_take_turns_when_changing_them_costs_more_than_it_gains():
    costs = SwitchCosts(resize_s=300.0, assign_s=300.0)
    decision = decide(late(roles={slot: BOTH for slot in range(6)}, costs=costs))
    assert decision.moves == ()
    assert decision.hold_training


def test_a_split_stays_when_changing_it_costs_more_than_it_gains():
    costs = SwitchCosts(resize_s=300.0, assign_s=300.0)
    decision = decide(scene(to_start=64, costs=costs, limits=Limits(max_num_seqs=16)))
    assert (decision.moves, decision.hold_training) == ((), False)


@pytest.mark.parametrize("may_share", [True, False])
def test_generation_grows_in_the_middle_of_a_step_when_it_is_what_is_late(may_share):
    """The trainer has eaten what was there; forty completions are not begun, and two of six slots generate."""
    state = scene(
        {"actor": "0-3", "rollout": "4-5"},
        running={4: [100] * 8, 5: [100] * 8},
        trained=8,
        to_start=40,
        group_size=2,
        limits=Limits(max_num_seqs=8, may_share=may_share),
    )
    decision = decide(state)
    moved = [move for move in decision.moves if "generate" in move.after]
    assert moved
    assert all(move.before == ("train",) for move in moved)
    assert all(move.after == (BOTH if may_share else ("generate",)) for move in moved)
    assert decision.prediction.gain_s > 0


@pytest.mark.parametrize("steps_left", [1, 5])
def test_the_rest_is_trained_on_all_slots_when_the_way_back_pays_too(steps_left):
    """Two slots train 2,000 tokens in 1.0 s, six in 0.37 s; resizing takes 0.4 s, once or twice."""
    state = scene(trained=50, ready=14, ready_tokens=2000, costs=replace(COSTS, resize_s=0.4), steps_left=steps_left)
    assert bool(decide(state).moves) == (steps_left == 1)


def test_where_the_whole_batch_is_there_nothing_holds_the_trainer():
    """Generation runs ahead: what is under way is of later steps."""
    state = late(ready=64, ready_tokens=64 * 300, steps_ahead=1, costs=SwitchCosts(resize_s=300.0, assign_s=300.0))
    assert not decide(state).hold_training


def test_handing_off_costs_less_where_caches_travel():
    carried = replace(COSTS, cache_bytes_per_token=1.0, cache_bytes_per_s=1e9)
    assert decide(late(costs=carried)).prediction.cost_s < decide(late()).prediction.cost_s / 10


@pytest.mark.parametrize(("completions", "moves"), [([50] * 8, 0), ([50] * 12, 1), ([50] * 64, 3)])
def test_a_slot_leaves_a_busy_trainer_for_what_outlasts_the_wait_and_not_for_less(completions, moves):
    """Each of five slots has 4 s of work in micro-steps of 1 s: whoever is to leave waits half of one, on average."""
    state = scene(
        roles={0: BOTH, 1: BOTH, 2: BOTH, 3: BOTH, 4: ("generate",), 5: BOTH},
        running={4: completions},
        ready=40,
        ready_tokens=20_000,
        seq_len=1024,
        group_size=2,
        limits=Limits(max_num_seqs=64),
    )
    assert len(decide(state).moves) == moves


@pytest.mark.parametrize("trained", [0, 16])
def test_scorers_come_back_for_what_was_generated_while_they_trained(trained):
    """A batch may be so short that nothing is left to generate when the policy is asked; and nothing is trained without
    scores."""
    away = {"placement": {"actor": 0, "rollout": "1-2", "inference": 3}, "roles": {3: ("train",)}}
    decision = Model().decide(scene(**away, to_score=8, to_score_tokens=800, trained=trained))
    assert [(move.slot, move.after) for move in decision.moves] == [(3, ("score",))]
    assert decision.reason.endswith("rollouts wait for their scores")
    assert not Model().decide(scene(**away, trained=trained)).moves, "nothing waits for them"


def test_that_all_generate_is_not_ordered_where_it_would_be_undone_at_once():
    """Two slots generate apart from the pool's, one trains: letting generators end one by one is as good as waiting."""
    roles = [("generate",), (), ("train",), ("generate",), ("generate",), ("generate",)]
    state = ClusterState(
        now_s=100.0,
        slots=tuple(SlotState(slot, held, 100.0 if slot > 1 else 0.0, slot > 1) for slot, held in enumerate(roles)),
        batch=BatchProgress(step=3, num_rollouts=64, group_size=2, to_start=56, num_updates=1, steps_left=1),
        trainer=TrainerState(ParallelLayout.of((2,)), held=True, seq_len=512),
        speeds=Speeds(DecodeSpeed(0.01, 0.001, 0.0), 10_000, TrainSpeed(1000, 0.02, 0.01), optim_s=0.1, publish_s=0.1),
        costs=SwitchCosts(resize_s=0.3, assign_s=0.2, release_s=0.05),
        home=Placement((0, 1, 2, 3), (4, 5), (), ""),
        limits=Limits(max_num_seqs=6, may_share=True),
        instances=tuple(instance_on("generate", (slot,)) for slot in (0, 3, 4, 5)),
        unfinished=(Unfinished("0/0", InstanceId("generator-0"), 100, 321, 1000, "0"),),
        lengths=Lengths((167,), (), 100.0),
        max_tokens=1000,
    )
    assert Model().decide(state).orders == ()


LENDS = Limits(max_num_seqs=16, may_share=False, offloads=True)
"""A slot has no memory for two roles, and the trainer's may lend their devices."""
LENT = {"roles": {0: BOTH, 1: BOTH}, "held": True, "limits": LENDS}
CHEAP = replace(COSTS, park_s=0.05, unpark_s=0.05)


@pytest.mark.parametrize(("park_s", "lends"), [(0.05, True), (60.0, False)])
def test_the_trainer_lends_its_devices_where_that_pays(park_s, lends):
    costs = replace(COSTS, park_s=park_s, unpark_s=park_s)
    decision = decide(scene(to_start=64, group_size=2, limits=LENDS, costs=costs))
    assert [move.slot for move in decision.moves if move.after == BOTH] == ([0, 1] if lends else [])
    assert decision.hold_training == lends


def test_a_first_step_begins_on_lent_devices_too():
    state = replace(scene(to_start=64, group_size=2, limits=LENDS), knows_generation=False)
    assert [move.after for move in decide(state).moves] == [BOTH, BOTH]


@pytest.mark.parametrize(
    ("changed", "goes_back"),
    [
        ({"to_start": 64, "group_size": 2}, False),
        ({}, False),
        ({"ready": 64, "ready_tokens": 9000}, True),
        ({"ready": 64, "ready_tokens": 9000, "running": {0: [10], 3: [20]}, "steps_ahead": 1}, True),
        ({"running": {3: [100] * 8}, "ready": 48, "ready_tokens": 9000}, True),
    ],
    ids=[
        "the step has just begun",
        "its rollouts are not asked for yet",
        "the whole batch is there",
        "and others of the next step are under way",
        "what is left is elsewhere",
    ],
)
def test_devices_go_back_when_there_is_something_to_train_and_not_before(changed, goes_back):
    decision = decide(scene(**LENT, costs=CHEAP, **changed))
    assert ({(move.slot, move.after) for move in decision.moves} >= {(0, ("train",)), (1, ("train",))}) == goes_back
    assert decision.hold_training or goes_back


def test_devices_go_back_for_a_command_that_waits_for_the_trainer():
    state = scene(**LENT, costs=CHEAP, to_start=64, group_size=2)
    wanted = replace(state, trainer=replace(state.trainer, wanted=True))
    decision = decide(wanted)
    assert {(move.slot, move.after) for move in decision.moves} >= {(0, ("train",)), (1, ("train",))}


def test_lent_devices_are_kept_where_their_rollouts_have_nowhere_to_go():
    """All slots train, and all have lent their devices; the next step's rollouts are under way on them."""
    lent = {"roles": dict.fromkeys(range(6), BOTH), "held": True, "limits": LENDS}
    state = scene(**lent, running={0: [10], 1: [20]}, ready=64, ready_tokens=9000, steps_ahead=1)
    decision = decide(state)
    assert (decision.moves, decision.hold_training) == ((), True)


def test_without_the_permission_no_device_is_lent():
    decision = Model(pre_process=False).decide(scene(to_start=64, group_size=2, limits=LENDS, costs=CHEAP))
    assert not [move for move in decision.moves if move.after == BOTH]
