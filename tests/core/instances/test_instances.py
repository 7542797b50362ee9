"""Instances: which there are for which roles, what they are called, and that they are moved as a whole."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.instances.instances import Instance, InstanceId, instance_on, named, slot_groups
from ductile.core.instances.placement import place
from ductile.core.instances.routing import GeneratorLoad, route
from ductile.core.scheduling.facts.cluster_state import Limits, Unfinished, first_instances
from ductile.core.scheduling.migration_targets import change, generators_on
from ductile.core.scheduling.orders import Decision, Migration, RoleChange, instances_after, violations
from ductile.core.scheduling.policies.model import Model
from ductile.core.scheduling.policies.rules import Rules
from tests.core.scheduling.scenes import scene

T, G, B, NONE = ("train",), ("generate",), ("train", "generate"), ()
SERVER = Instance(InstanceId("http://there"), "generate", ())
PAIRS = Limits(max_num_seqs=8, slots_per_generator=2)


def ids(instances):
    return [each.id for each in instances]


@pytest.mark.parametrize(
    ("placement", "limits", "expected"),
    [
        ({"actor": 0, "rollout": "1-2"}, Limits(), ["generator-1", "generator-2"]),
        ({"actor": 4, "rollout": "0-3"}, PAIRS, ["generator-0-1", "generator-2-3"]),
        ({"actor": 3, "rollout": "0-2"}, PAIRS, ["generator-0-1"]),
        ({"actor,rollout": "0-1", "inference": 2}, Limits(), ["generator-0", "generator-1", "scorer-2"]),
        ({"actor,rollout": 0, "inference": "1-2"}, Limits(slots_per_scorer=2), ["generator-0", "scorer-1-2"]),
    ],
)  # fmt: skip
def test_the_first_instances_follow_from_the_placement(placement, limits, expected):
    assert ids(first_instances(place(placement), limits)) == expected


def test_groups_are_those_of_the_configuration_first():
    assert slot_groups((1, 2, 5), range(8), 2) == ((1, 2), (0, 3), (4, 6))
    assert slot_groups((3, 4), range(5), 1) == ((3,), (4,), (0,), (1,), (2,))


def test_an_instance_lives_as_long_as_its_slots_keep_the_role_and_its_id_is_not_used_again():
    state = scene({"actor": "0-1", "rollout": "2-5"}, limits=PAIRS, servers=[SERVER])
    assert ids(state.instances) == ["generator-2-3", "generator-4-5", "http://there"]
    gone = Decision(change(state, {2: T, 3: T}))
    assert ids(instances_after(state, gone)) == ["generator-4-5", "http://there"]
    later = scene(roles={2: T, 3: T}, limits=PAIRS)
    back = Decision(change(later, {2: G, 3: G}))
    assert ids(instances_after(later, back)) == ["generator-2-3.1", "generator-4-5"]
    both = Decision(change(state, {0: B, 1: B, 2: B, 3: B}))
    assert ids(instances_after(state, both))[:2] == ["generator-0-1.1", "generator-2-3"], "training besides is no end"


@given(st.lists(st.dictionaries(st.sampled_from([0, 2, 4]), st.sampled_from([T, G, NONE]), min_size=1), max_size=12))
def test_no_id_comes_twice_whatever_is_decided(decisions):
    roles, living, seen = dict.fromkeys(range(7), T), (), set()
    for number, wanted in enumerate(decisions, start=1):
        after = roles | {slot: held for first, held in wanted.items() for slot in (first, first + 1)}
        state = replace(
            scene({"actor": 6, "rollout": "0-5"}, roles=roles, limits=PAIRS), instances=living, change=number
        )
        orders = tuple(RoleChange(slot, roles[slot], after[slot]) for slot in after if roles[slot] != after[slot])
        there = instances_after(state, Decision(orders))
        assert {slot for each in there for slot in each.slots} == {slot for slot, held in after.items() if held == G}
        new = {each.id for each in there} - {each.id for each in living}
        assert not new & seen, "an id is never used again"
        seen, roles, living = seen | new, after, there


def test_requests_are_routed_to_instances_wherever_they_are():
    loads = [GeneratorLoad(each.id, 10.0) for each in (instance_on("generate", (0, 1)), SERVER)]
    assert route("", loads, 64, 16).instance == "generator-0-1", "of equal ones the first"
    loads[0] = GeneratorLoad(loads[0].instance, 500.0, frozenset({"g"}))
    assert route("g", loads, 64, 16).instance == "http://there"


@pytest.mark.parametrize(
    ("orders", "sentence"),
    [
        ([RoleChange(2, G, T)], "the generator of slots 2-3 would be split: only slot 3 would generate"),
        ([RoleChange(0, T, B)], "the generator of slots 0-1 would be split: only slot 0 would generate"),
        ([RoleChange(6, T, B)], "slot 6 cannot generate: a generator takes 2 slots of one group, and there is none"),
        ([RoleChange(2, G, T), RoleChange(3, G, T)], "rollout 2/0 would be left behind on generator-2-3"),
        ([Migration("2/0", "generator-2-3", "generator-0-1.1")], "rollout 2/0 cannot go to generator-0-1.1, which"),
        ([Migration("2/0", "generator-2", "http://there")], "rollout 2/0 is not on generator-2"),
    ],
)
def test_a_decision_that_would_split_an_instance_is_refused_with_a_sentence(orders, sentence):
    state = scene({"actor": "0-1,6", "rollout": "2-5"}, limits=PAIRS, servers=[SERVER])
    state = replace(state, unfinished=(Unfinished("2/0", InstanceId("generator-2-3"), 100, 5, 1000),))
    assert [said for said in violations(state, Decision(tuple(orders))) if said.startswith(sentence)]


def test_whole_instances_may_go_and_their_rollouts_go_to_a_server_on_no_slot():
    running = {"generator-2-3": [5, 9], "generator-4-5": [7], SERVER.id: [1]}
    state = scene(limits=PAIRS, servers=[SERVER], running=running)
    orders = change(state, dict.fromkeys((2, 3, 4, 5), T))
    assert {order.target for order in orders if isinstance(order, Migration)} == {"http://there"}
    assert {order.source for order in orders if isinstance(order, Migration)} == {"generator-2-3", "generator-4-5"}
    assert violations(state, Decision(orders)) == [], "the server is a generator: the floor holds"
    alone, moves = scene(limits=PAIRS, to_start=1), Decision(orders).moves
    assert violations(alone, Decision(moves)) == ["0 generators would be left, and 1 is the least"]


def test_the_rules_free_whole_generators_and_need_none_beside_a_server_that_is_enough():
    state = scene(limits=PAIRS, running={"generator-2-3": [5] * 3, "generator-4-5": [5]}, ready=60, trained=4)
    orders = Rules().decide(state).orders
    assert {order.slot for order in orders if isinstance(order, RoleChange)} == {4, 5}
    state = scene(limits=PAIRS, servers=[SERVER], running={"generator-2-3": [5] * 3}, ready=60, trained=4)
    orders = Rules().decide(state).orders
    assert {order.slot for order in orders if isinstance(order, RoleChange)} == {2, 3, 4, 5}
    assert {order.target for order in orders if isinstance(order, Migration)} == {"http://there"}


def test_a_scorer_that_has_lost_a_slot_for_good_is_none_any_more_and_what_is_left_of_it_trains_on():
    placement, limits = {"actor": 0, "rollout": 1, "inference": "2-5"}, Limits(slots_per_scorer=2)
    whole = scene(placement, roles=dict.fromkeys((2, 3, 4, 5), T), limits=limits)
    back = Rules().decide(whole)
    assert {order.slot: order.after for order in back.orders} == dict.fromkeys((2, 3, 4, 5), ("score",))
    assert ids(instances_after(whole, back)) == ["generator-1", "scorer-2-3.1", "scorer-4-5.1"]
    halved = scene(placement, roles={2: T, 3: NONE, 4: T, 5: T}, limits=limits, to_start=8)
    halved = replace(halved, slots=tuple(slot for slot in halved.slots if slot.slot != 3))
    for policy in (Rules(), Model()):
        orders = policy.decide(halved).orders
        assert {order.slot: order.after for order in orders if order.slot > 1} == dict.fromkeys((4, 5), ("score",))


def test_the_model_moves_whole_generators_and_counts_their_slots():
    roles = {slot: B for slot in range(4)} | {4: G, 5: G}
    running = {name: [300] for name in ("generator-0-1", "generator-2-3", "generator-4-5")}
    state = scene(
        {"actor": "0-3", "rollout": "4-5"},
        roles=roles,
        running=running,
        held=True,
        limits=PAIRS,
        ready=48,
        ready_tokens=12_000,
    )
    decision = Model().decide(state)
    assert decision.orders
    assert violations(state, decision) == []
    assert len({order.source for order in decision.migrations}) == 2
    assert len({order.target for order in decision.migrations}) == 1


def test_generators_on_slots_are_whole_and_servers_are_always_there():
    state = scene(limits=PAIRS, servers=[SERVER])
    assert generators_on(state.instances, {2, 3, 4}) == ["generator-2-3", "http://there"]
    assert generators_on(state.instances, None) == ["generator-2-3", "generator-4-5", "http://there"]


def test_a_few_instances_are_named_and_many_are_counted():
    assert named(["generator-10", "generator-2", "generator-2"]) == "generator-2, generator-10"
    assert named([InstanceId(f"generator-{slot}") for slot in range(5)]) == "5 instances"
