"""Simulated generators on two slots and on none: they are moved as a whole, and everything is accounted for."""

from dataclasses import replace

import pytest

from ductile.core.instances.instances import Instance, InstanceId
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.core.scheduling.orders import Decision, RoleChange
from ductile.core.scheduling.policies.model import Model
from ductile.core.scheduling.policies.rules import Rules
from ductile.core.scheduling.policies.static import InTurns, Static
from ductile.elastic.policy_decision import BadDecision
from ductile.observe import read_jsonl
from ductile.sim.run import simulate
from tests.sim.scenarios import scenario

POLICIES = [Static(), InTurns(), Rules(), Rules(True, True), Model()]
SERVER = Instance(InstanceId("http://there"), "generate", ())
PAIRS = Limits(max_num_seqs=16, slots_per_generator=2)


def mixed(servers=()):
    return replace(scenario({"actor": "0-1", "rollout": "2-5"}, limits=PAIRS), servers=servers)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("servers", [(), (SERVER,)], ids=["pairs", "pairs and a server"])
def test_every_rollout_is_trained_once_and_every_second_is_accounted_for(policy, servers, tmp_path):
    result = simulate(mixed(servers), policy, tmp_path)
    assert len(result.step_s) == 2
    assert sum(result.totals.values()) == pytest.approx(result.wall_s * result.num_slots)
    for change in result.changes:
        moved = {
            move.slot for move in change.decision.moves if ("generate" in move.before) != ("generate" in move.after)
        }
        assert all({slot, slot ^ 1} <= moved for slot in moved), "both slots of a generator, or neither"
    assert result.changes or isinstance(policy, Static | InTurns), "slots change roles"
    began = [each["id"] for row in read_jsonl(tmp_path / "events.jsonl") for each in row.get("began", ())]
    assert len(began) == len({*began, "generator-2-3", "generator-4-5"}) - 2, "no id is used again"


@pytest.mark.parametrize("policy", [Rules(), Rules(True, True), Model()], ids=repr)
def test_a_scorer_on_two_slots_trains_and_scores_again_as_a_whole(policy):
    limits = Limits(max_num_seqs=16, slots_per_scorer=2)
    placed = scenario({"actor": 0, "rollout": "1-3", "inference": "4-7"}, score=True, limits=limits, num_steps=3)
    result = simulate(placed, policy)
    moves = [move for change in result.changes for move in change.decision.moves if move.slot >= 4]
    for change in result.changes:
        moved = {move.slot for move in change.decision.moves if ("score" in move.before) != ("score" in move.after)}
        assert all({slot, slot ^ 1} <= moved for slot in moved), "both slots of a scorer, or neither"
    assert {("score",), ("train",)} <= {move.before for move in moves}, "it has left and come back"


def test_a_server_on_no_slot_shortens_the_run():
    assert simulate(mixed((SERVER,)), Static()).wall_s < simulate(mixed(), Static()).wall_s


def test_an_instance_that_would_be_split_ends_the_simulation_with_a_sentence():
    class Splits:
        def decide(self, state):
            return Decision((RoleChange(2, ("generate",), ("train",)),))

    with pytest.raises(BadDecision, match="the generator of slots 2-3 would be split: only slot 3 would generate"):
        simulate(mixed(), Splits())
