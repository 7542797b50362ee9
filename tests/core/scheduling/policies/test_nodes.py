"""Policies over several nodes, as stories: whole nodes change, tp groups stay inside nodes, and the network costs."""

from dataclasses import replace

import pytest

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import LayoutRules, layout_for
from ductile.core.layout.geometry.node_order import split_groups
from ductile.core.layout.geometry.topology import ONE_NODE, Topology
from ductile.core.scheduling.costs.cost_model import PRIORS, CostModel
from ductile.core.scheduling.drains import plan_drain
from ductile.core.scheduling.migration_targets import change, remaining_tokens
from ductile.core.scheduling.orders import explained, layout_after, roles_after, violations
from ductile.core.scheduling.policies.arrange import Arrangements
from ductile.core.scheduling.policies.rules import Rules
from tests.core.scheduling.scenes import COSTS, scene

FOURS = Topology.of(slots_per_node=4, num_nodes=3)


def on_nodes(state, topology=FOURS, tp=1):
    """The state with its slots on nodes of four."""
    rules = LayoutRules(asked=AskedLayout(tp=tp), topology=topology)
    layout = layout_for(state.trainer.layout.slots, rules)
    return replace(state, trainer=replace(state.trainer, layout=layout, rules=rules))


def late(running, *, trained=8):
    """A step's tail: the trainer has node 0, and rollouts are left on these generators of nodes 1 and 2."""
    running = {slot: running.get(slot, []) for slot in range(4, 12)}
    return scene({"actor": "0-3", "rollout": "4-11"}, running=running, trained=trained, num_rollouts=64)


def moved(decision):
    return sorted(move.slot for move in decision.moves)


def test_generators_are_given_to_the_trainer_node_by_node():
    """By tokens alone slots 7 and 9 to 11 would be freed, whose rollouts are nearly done: parts of two nodes."""
    nearly_done = (7, 9, 10, 11)
    state = late({slot: [900 if slot in nearly_done else 1] * 4 for slot in range(4, 12)})
    assert moved(Rules().decide(state)) == [*nearly_done]
    decision = Rules().decide(on_nodes(state))
    assert moved(decision) == [8, 9, 10, 11]
    assert "all of node 2" in decision.reason
    assert violations(on_nodes(state), decision) == []


def test_what_is_left_of_a_node_goes_first():
    """Slots 4 and 5 train already: the rest of their node goes before any slot of node 2."""
    running = {slot: [500] * 4 for slot in range(6, 12)}
    state = on_nodes(scene({"actor": "0-5", "rollout": "6-11"}, running=running, trained=8, num_rollouts=64))
    arrangements = Arrangements(state, range(12), remaining_tokens(state))
    assert arrangements.generators(4) == {8, 9, 10, 11}
    assert arrangements.trainers(4) == {*range(8)}
    assert arrangements.generators(8) == {*range(4, 12)}, "and back: the trainer leaves node 1 before its own"


@pytest.mark.parametrize("topology", [ONE_NODE, FOURS])
def test_tp_groups_stay_inside_nodes(topology):
    """One generator is left, on node 0: with tp 2 its neighbour has no partner there."""
    state = on_nodes(late({4: [500]}), topology, tp=2)
    decision = Rules().decide(state)
    layout = layout_after(state, decision)
    assert len(layout.slots) == 10
    if topology.nodes:
        assert split_groups(layout, FOURS) == []
        assert 7 not in layout.slots
        assert "tp groups stay inside nodes" in decision.reason
    else:
        assert "node" not in decision.reason


def test_a_group_that_has_to_be_on_two_nodes_is_named():
    state = on_nodes(late({}), tp=2)
    orders = change(state, dict.fromkeys((5, 6, 7, 9, 10, 11), ("train",)))
    assert "a tp group is on several nodes: slots 7,11" in explained(state, orders)
    assert "all of nodes 1-2; tp groups stay inside nodes" in explained(
        state, change(state, dict.fromkeys(range(4, 12), ("train",)))
    )


def test_a_drained_node_leaves_whole_groups_to_the_trainer():
    """Of the seven slots that stay tp 2 takes six, and not slot 2, which has no partner on its node."""
    state = on_nodes(scene({"actor": "0-2,4-8", "rollout": "3,9-11"}), tp=2)
    step = plan_drain(state, [8])
    assert step.verdict == "change"
    layout = layout_after(state, step.decision)
    assert split_groups(layout, FOURS) == []
    assert sorted(layout.slots) == [0, 1, 4, 5, 6, 7]


def test_a_resize_over_nodes_costs_more():
    costs = replace(COSTS, resize_network_s=1.0, assign_network_s=2.0)
    state = on_nodes(replace(late({4: [500]}), costs=costs))
    assert state.resize_s((2, 3)) == costs.resize_s
    assert state.resize_s((0, 4)) == costs.resize_s + 1.0
    assert state.has_weights_near((4, 5))
    there = replace(state, instances=tuple(each for each in state.instances if each.slots[0] < 8))
    assert not there.has_weights_near((8,)), "no instance is left on node 2"
    assert replace(there, trainer=replace(there.trainer, rules=LayoutRules())).has_weights_near((8,))


def test_costs_over_nodes_are_measured_by_themselves():
    measured = CostModel(cache_bytes_per_token=8, topology=FOURS)
    costs = measured.costs()
    assert costs.between(nodes=True).resize_s == pytest.approx(4 * PRIORS["resize"]), "as links are slower"
    assert costs.between(nodes=True).cache_bytes_per_s == pytest.approx(costs.cache_bytes_per_s / 4)
    for _ in range(3):
        measured.took("resize", 0.4)
        measured.took("resize_across", 0.9)
        measured.took("assign_across", 0.1)
    costs = measured.costs()
    assert (costs.resize_s, costs.between(nodes=True).resize_s) == pytest.approx((0.4, 0.9))
    assert costs.assign_network_s == 0.0, "what is faster over the network costs nothing more"
    assert CostModel(cache_bytes_per_token=8).costs().resize_network_s == 0.0


def test_the_roles_after_a_decision_are_the_same_on_one_node_where_nodes_do_not_matter():
    state = late({})
    assert roles_after(state, Rules().decide(state)) == roles_after(on_nodes(state), Rules().decide(on_nodes(state)))
