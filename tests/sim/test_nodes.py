"""Simulated runs over several nodes: the real policies, what changes between nodes cost, and what is written of it."""

import json
from dataclasses import replace

import pytest

from ductile.config.reading.parse import parse
from ductile.config.schema.simulate import SimulateConfig
from ductile.core.layout.choice.layout_rules import LayoutRules
from ductile.core.layout.geometry.topology import ONE_NODE, Topology
from ductile.core.scheduling.costs.cost import SwitchCosts
from ductile.core.scheduling.policies.rules import Rules
from ductile.events.decisions import StateReader, StateWriter
from ductile.sim.configured import configured
from ductile.sim.run import simulate
from tests.core.scheduling.scenes import scene
from tests.sim.scenarios import scenario

THREES = Topology.of(slots_per_node=3, num_nodes=2)
COSTS = SwitchCosts(resize_s=0.2, assign_s=0.2, release_s=0.05, migration_s=0.05)


@pytest.fixture(scope="module", name="runs")
def _runs():
    """The same run with slots on one node, and on two whose network is slow."""
    slow = replace(COSTS, resize_network_s=3.0, assign_network_s=3.0)
    return {
        nodes: simulate(scenario(costs=slow, rules=LayoutRules(topology=topology)), Rules())
        for nodes, topology in ((1, ONE_NODE), (2, THREES))
    }


def test_a_change_over_nodes_takes_longer(runs):
    assert len(runs[2].changes) >= 2
    resizes = [change for change in runs[2].changes if any("train" in move.after for move in change.decision.moves)]
    assert min(change.seconds for change in resizes) >= 3.0
    assert runs[1].wall_s < runs[2].wall_s


def test_seconds_are_told_by_node(runs):
    assert list(runs[1].by_node) == [0]
    assert list(runs[2].by_node) == [0, 1]
    of_all = sum(seconds for of_node in runs[2].by_node.values() for seconds in of_node.values())
    assert of_all == pytest.approx(runs[2].slot_seconds)


def test_reasons_say_which_nodes_change(runs):
    assert any("all of node 1" in change.decision.reason for change in runs[2].changes)
    assert not any("node" in change.decision.reason for change in runs[1].changes)


def test_the_config_says_how_many_slots_a_node_has():
    words = ["--cluster.slots-per-node", "4", "--costs.resize-network-s", "0.5"]
    found = configured(parse(SimulateConfig, words).config)
    assert found.topology.nodes == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found.costs.resize_network_s == 0.5
    assert configured(parse(SimulateConfig, []).config).topology == ONE_NODE


def test_a_decision_s_state_comes_back_with_its_nodes():
    state = scene(running={2: [5]})
    rules = LayoutRules(topology=THREES, nodes_per_fsdp_group=1)
    state = replace(state, trainer=replace(state.trainer, rules=rules))
    assert state.topology.node(4) == 1, "which is remembered, and no part of the state"
    row = json.loads(json.dumps(StateWriter().difference(state)))
    assert StateReader().state(row) == state
