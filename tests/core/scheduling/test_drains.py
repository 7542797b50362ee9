"""What becomes of the roles of slots that are to be gone: a table of placements, and what is told in words."""

from dataclasses import replace

import pytest

from ductile.core.instances.placement import place
from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import LayoutRules
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.drains import RoleMoves, home_without, moves_of, plan_drain, plan_return
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.core.scheduling.orders import instances_after, layout_after, roles_after, violations
from tests.core.scheduling.scenes import id_on, scene

T, G, S, TG, GS, NONE = ("train",), ("generate",), ("score",), ("train", "generate"), ("generate", "score"), ()
QUICKSTART = {"actor": 0, "rollout": "1-2", "inference": 3}
APART = Limits(may_share=False, max_num_seqs=8)


@pytest.mark.parametrize(
    ("placement", "limits", "leaving", "changed"),
    [
        (QUICKSTART, None, {1}, {1: NONE}),
        (QUICKSTART, None, {3}, {3: NONE, 1: GS}),
        (QUICKSTART, None, {0}, {0: NONE, 1: TG}),
        (QUICKSTART, None, {0, 1}, {0: NONE, 1: NONE, 2: TG}),
        (QUICKSTART, None, {1, 2}, {1: NONE, 2: NONE, 0: TG}),
        (QUICKSTART, None, {0, 1, 2}, {0: NONE, 1: NONE, 2: NONE, 3: ("train", "generate", "score")}),
        (QUICKSTART, APART, {0}, {0: NONE, 2: T}),
        (QUICKSTART, APART, {3}, {3: NONE, 2: S}),
        ({"actor": "0-2", "rollout": "3-4"}, None, {1}, {1: NONE}),
        ({"actor": "0-2", "rollout": "3-4"}, None, {3, 4}, {3: NONE, 4: NONE, 0: TG}),
        ({"actor": "0-2", "rollout": "3"}, APART, {3}, {3: NONE, 0: G}),
        ({"actor,rollout": "0-1"}, None, {0}, {0: NONE}),
    ],
)
def test_what_slots_hold_once_some_are_emptied(placement, limits, leaving, changed):
    state = scene(placement, running={1: [5, 9]} if placement is QUICKSTART else None, limits=limits, to_start=4)
    step = plan_drain(state, leaving)
    assert step.verdict == "change", step.reason
    assert not violations(state, step.decision)
    before = {slot.slot: slot.roles for slot in state.slots}
    after = roles_after(state, step.decision)
    assert {slot: roles for slot, roles in after.items() if roles != before[slot]} == changed
    assert {slot for each in instances_after(state, step.decision) for slot in each.slots}.isdisjoint(leaving)
    left = {order.id for order in step.decision.migrations}
    assert left == ({"1/0", "1/1"} if placement is QUICKSTART and 1 in leaving else set()), "with what they have"


@pytest.mark.parametrize(
    ("placement", "limits", "leaving", "why"),
    [
        (QUICKSTART, None, {0, 1, 2, 3}, "no other slot can take the trainer's state over"),
        ({"actor": 0, "rollout": 1}, APART, {0}, "no other slot can take the trainer's state over"),
        ({"actor": 0, "rollout": 1}, APART, {1}, "no other slot can generate"),
        ({"actor": 0, "rollout": 1, "inference": 2}, APART, {2}, "no other slot can score"),
    ],
)
def test_what_cannot_be_emptied_stays_and_says_why(placement, limits, leaving, why):
    step = plan_drain(scene(placement, limits=limits, to_start=4), leaving)
    assert (step.verdict, step.reason) == ("cannot", why)


@pytest.mark.parametrize(
    ("placement", "limits", "leaving", "others", "merged", "changed"),
    [
        ({"actor": "0-2", "rollout": "3"}, None, {0}, {1}, True, {0: NONE, 1: NONE}),
        ({"actor": "0-2", "rollout": "3"}, None, {0}, {1}, False, {0: NONE}),
        (QUICKSTART, None, {1}, {0, 2, 3}, True, {1: NONE}),
        ({"actor": "0-1", "rollout": "2"}, APART, {0}, {1}, True, {0: NONE}),
        (QUICKSTART, None, {0}, {1}, False, {0: NONE, 2: TG}),
    ],
    ids=["in one step", "after a failure", "the others cannot go", "nor can the last", "others get nothing"],
)
def test_a_drain_is_done_beside_others_and_without_them_where_they_cannot_be(
    placement, limits, leaving, others, merged, changed
):
    state = scene(placement, limits=limits, to_start=4)
    step = plan_drain(state, leaving, others, merged=merged)
    assert step.verdict == "change", step.reason
    assert not violations(state, step.decision)
    before = {slot.slot: slot.roles for slot in state.slots}
    after = roles_after(state, step.decision)
    assert {slot: roles for slot, roles in after.items() if roles != before[slot]} == changed


def test_a_drain_waits_neither_for_slots_of_others_nor_for_their_end():
    assert plan_drain(scene(QUICKSTART, roles={1: NONE}), {1}, {2}).verdict == "done"
    state = scene(QUICKSTART, not_ready=[2], to_start=4)
    assert plan_drain(state, {1}, {2}).decision.moves[0].slot == 1
    assert plan_drain(state, {2}, {1}).reason == "slot 2 is not ready for another role"


def test_empty_slots_are_done_and_busy_ones_are_waited_for():
    assert plan_drain(scene(QUICKSTART, roles={1: NONE}), {1, 7}).verdict == "done"
    waits = plan_drain(scene(QUICKSTART, not_ready=[1]), {1})
    assert (waits.verdict, waits.reason) == ("wait", "slot 1 is not ready for another role")
    assert plan_drain(scene(QUICKSTART, at_boundary=False), {1}).reason == "the trainer is being resized"


def test_the_trainer_gets_its_devices_back_first():
    limits = Limits(may_share=False, offloads=True, max_num_seqs=8)
    state = scene({"actor": "0-1", "rollout": "2-3"}, roles={0: TG, 1: TG}, limits=limits, held=True)
    first = plan_drain(state, {0})
    assert {move.slot: move.after for move in first.decision.moves} == {0: T, 1: T}
    back = replace(scene({"actor": "0-1", "rollout": "2-3"}, limits=limits), change=2)
    assert {move.slot: move.after for move in plan_drain(back, {0}).decision.moves} == {0: NONE}


def test_the_trainer_keeps_as_many_slots_as_are_a_layout():
    state, rules = scene({"actor": "0-3", "rollout": "4-5"}), LayoutRules(asked=AskedLayout(tp=2))
    layout = ParallelLayout.of(range(4), tp=2)
    state = replace(state, trainer=replace(state.trainer, layout=layout, rules=rules))
    step = plan_drain(state, {1})
    assert layout_after(state, step.decision) == ParallelLayout.of((0, 2), tp=2)
    assert roles_after(state, step.decision) | {4: G, 5: G} == {0: T, 1: NONE, 2: T, 3: NONE, 4: G, 5: G}
    whole = plan_drain(state, {0, 1, 2})
    assert layout_after(state, whole.decision).slots == (3, 4), "one that generates stands in, as two are the least"


def test_a_scorer_on_two_slots_ends_with_either_and_begins_on_others():
    limits = Limits(max_num_seqs=8, slots_per_scorer=2, min_score=1)
    state = scene({"actor": 0, "rollout": "1-3", "inference": "4-5"}, limits=limits)
    step = plan_drain(state, {5})
    assert step.verdict == "change", step.reason
    after = roles_after(state, step.decision)
    assert (after[4], after[5]) == (NONE, NONE)
    (scorer,) = [each for each in instances_after(state, step.decision) if each.role == "score"]
    assert len(scorer.slots) == 2
    assert {*scorer.slots}.isdisjoint({4, 5})


def test_the_reason_says_which_slots_and_what_they_did():
    state = scene(QUICKSTART, running={1: [5, 9]})
    assert plan_drain(state, {1}).decision.reason == (
        "slot 1 generate → nothing: 2 rollouts left, migrated to generator-2; slot 1 is to be gone"
    )


def test_slots_that_come_back_get_what_they_held_and_who_stood_in_goes_back():
    state = scene(QUICKSTART)
    drained = moves_of(plan_drain(state, {0}).decision, {0})
    assert drained == RoleMoves({0: T, 1: G}, {0: NONE, 1: TG}, frozenset({0}))
    now = scene(QUICKSTART, roles={0: NONE, 1: TG})
    step = plan_return(now, [drained], {0})
    assert {move.slot: move.after for move in step.decision.moves} == {0: T, 1: G}
    assert "slot 0 is back" in step.decision.reason
    moved_on = scene(QUICKSTART, roles={0: NONE, 1: T, 2: G})
    assert {move.slot: move.after for move in plan_return(moved_on, [drained], {0}).decision.moves} == {0: T}
    assert plan_return(state, [], {0}).verdict == "done"


def test_of_two_drains_of_a_slot_the_later_one_says_what_it_held():
    first = RoleMoves({1: G}, {1: NONE}, frozenset({1}))
    second = RoleMoves({1: T}, {1: NONE}, frozenset({1}))
    step = plan_return(scene(QUICKSTART, roles={1: NONE}), [first, second], {1})
    assert {move.slot: move.after for move in step.decision.moves} == {1: T}


def test_policies_return_slots_to_a_home_without_those_that_are_gone():
    state = scene(QUICKSTART, roles={0: NONE, 1: TG})
    there = replace(state, slots=tuple(slot for slot in state.slots if slot.slot != 0))
    home = home_without(there, {0})
    assert (home.train, home.generate, home.score) == ((1,), (1, 2), (3,))
    assert home_without(state, {7}) is state.home
    assert home_without(state, ()) == place(QUICKSTART)
    assert id_on(1) in {each.id for each in state.instances}
