"""What a policy was asked with comes back from decisions.jsonl bit for bit, whatever it was asked with before."""

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.core.instances.instances import InstanceId
from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import NO_RULES, LayoutRules
from ductile.core.scheduling.facts.cluster_state import Unfinished
from ductile.core.scheduling.orders import Decision, Prediction
from ductile.events.decisions import DecisionJournal, StateReader, StateWriter
from ductile.observe import Recorder, json_line, read_jsonl
from tests.core.layout.test_layout_rules import RULES
from tests.core.scheduling.policies.test_properties import states
from tests.core.scheduling.scenes import id_on, scene
from tests.nightly import examples


@st.composite
def rollouts(draw):
    """Rollouts of three generators in any order, each with its own id; two draws have most ids in common."""
    ids = draw(st.lists(st.integers(0, 20), max_size=12, unique=True))
    tokens = st.integers(0, 3)
    return tuple(
        Unfinished(f"{n}", InstanceId(f"generator-{draw(st.integers(2, 4))}"), n, draw(tokens), 99, f"{n // 2}")
        for n in ids
    )


def read_back(asked):
    """The states as a reader has them that got the lines of a file."""
    writer, reader = StateWriter(), StateReader()
    return [reader.state(json.loads(json_line(writer.difference(state)))) for state in asked]


@given(st.lists(states(), min_size=1, max_size=4))
@settings(max_examples=examples(60), deadline=None)
def test_states_come_back_as_they_were(asked):
    assert read_back(asked) == asked


@given(st.lists(rollouts(), min_size=1, max_size=5))
@settings(max_examples=examples(200), deadline=None)
def test_rollouts_come_back_in_their_order(each):
    """Policies go through the rollouts in order, so the order is a part of the state."""
    asked = [replace(scene(), unfinished=there) for there in each]
    assert read_back(asked) == asked


@given(st.lists(st.lists(st.integers(1, 3), min_size=9, max_size=12), min_size=2, max_size=4))
@settings(max_examples=examples(100), deadline=None)
def test_lengths_that_leave_at_one_end_and_come_at_the_other_come_back(each):
    asked = [replace(scene(), lengths=replace(scene().lengths, ended=tuple(ended))) for ended in each]
    assert read_back(asked) == asked


def test_numbers_come_back_to_the_last_bit_and_so_does_infinity():
    speeds = replace(scene().speeds, prefill_tokens_per_s=0.1 + 0.2, optim_s=5e-324)
    asked = [scene(), scene(speeds=speeds), scene(speeds=replace(speeds, score_tokens_per_s=7.5))]
    assert [state.speeds for state in read_back(asked)] == [state.speeds for state in asked]
    assert asked[0].speeds.score_tokens_per_s == float("inf")


def test_the_rules_of_the_layout_come_back_with_what_they_do_not_know():
    state = scene()
    asked = [replace(state, trainer=replace(state.trainer, rules=rules)) for rules in (RULES, NO_RULES)]
    assert [read_back([state]) for state in asked] == [[state] for state in asked]


def test_copies_of_a_state_from_before_there_were_layout_rules_are_asked_for():
    (plain,) = [json.loads(json_line(StateWriter().difference(scene())))]
    del plain["trainer"]["rules"]
    plain["trainer"]["dp_replicate"] = 2
    assert StateReader().state(plain).trainer.rules == LayoutRules(asked=AskedLayout(dp_replicate=2))


def test_a_line_has_what_differs_from_the_line_before(tmp_path):
    record = Recorder(tmp_path)
    journal = DecisionJournal(record, {"name": "model"})
    state = scene(running={2: [5, 6], 3: [7]})
    later = replace(
        state, now_s=101.5, unfinished=(*(each._replace(generated=each.generated + 3) for each in state.unfinished),)
    )
    new = Unfinished("new", id_on(3), 1, 0, 9)
    journal.decided(state, Decision())
    journal.decided(later, Decision(reason="it is so", prediction=Prediction(2.0, float("inf"))))
    journal.refused(replace(later, unfinished=(*later.unfinished[1:], new)), "it failed")
    record.close()
    first, second, third = read_jsonl(tmp_path / "decisions.jsonl")
    assert first["policy"] == {"name": "model"}
    assert first["decision"] == {}
    assert second == {
        "number": 2,
        "state": {"now_s": 101.5, "unfinished": {"grown": {"generator-2": [2, 3], "generator-3": [1, 3]}}},
        "decision": {"reason": "it is so", "prediction": {"stay_s": 2.0, "go_s": None, "cost_s": 0.0}},
    }
    assert third == {
        "number": 3,
        "state": {"unfinished": {"gone": [0], "new": [[2, ["new", "generator-3", 1, 0, 9, "", 0]]]}},
        "refused": "it failed",
    }
