"""What a run's events come to, applied in pieces or whole, of one start or of several."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.core.instances.instances import instance_on
from ductile.core.instances.placement import Placement
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.core.scheduling.facts.profile import Setting, StepProfile
from ductile.events.lines import read_event
from ductile.events.run_state import RunState
from ductile.events.servers import ServerChanged, ServerJoined, ServerLeft
from tests.core.scheduling.scenes import COSTS, SPEEDS
from tests.nightly import examples

PLACEMENT = Placement((0,), (1, 2), (), "as said")
FIRST = (instance_on("generate", (1,)), instance_on("generate", (2,)))
SETTING = Setting(PLACEMENT, Limits(), "model", 2, 4, 2, 64, 128, instances=FIRST).as_fields()
NEW = instance_on("generate", (0,), birth=1)


def profile(step):
    return StepProfile(step, step - 1.0, float(step), (), (4, 7), 9.0, SPEEDS, COSTS).as_fields()


KINDS = {
    "setting": SETTING,
    "profile": profile(1),
    "resized": {"epoch": 1, "before": [0], "after": [0, 1], "pause_s": 0.1},
    "held": {"at_s": 1.0, "holds": True},
    "switched": {
        "at_s": 1.0,
        "seconds": 0.5,
        "slots": [0],
        "began": [{"id": NEW.id, "role": NEW.role, "slots": NEW.slots}],
        "ended": [FIRST[0].id],
    },
    "slot_lost": {"slot": 2},
    "decided": {"at_s": 1.0},
    "died": {"code": "slot_died"},
    "slept": {"of": "a later version"},
}


def row(time_s, kind, sentence="It is so.", **fields):
    return {"time": time_s, "kind": kind, "sentence": sentence, **(fields or KINDS[kind])}


@st.composite
def journals(draw):
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=12))
    return [row(1000.0 + at, kind, draw(st.sampled_from(["", "It is so."]))) for at, kind in enumerate(kinds)]


@given(journals(), st.data())
@settings(max_examples=examples(100), deadline=None)
def test_a_journal_in_pieces_comes_to_what_it_comes_to_whole(rows, data):
    """As one that is read while the run goes on writing it."""
    cut = data.draw(st.integers(0, len(rows)))
    state = RunState.of(rows[:cut])
    for each in rows[cut:]:
        state.apply(read_event(each))
    assert state == RunState.of(rows)


@given(journals(), journals())
@settings(max_examples=examples(100), deadline=None)
def test_a_resumed_run_is_what_it_was_since_and_its_sentences_are_of_all_starts(before, after):
    resumed = [row(2000.0, "setting", ""), *after]
    whole, since = RunState.of([*before, *resumed]), RunState.of(resumed)
    earlier = RunState.of(before)
    assert replace(whole, sentences=[], waits=[]) == replace(since, sentences=[], waits=[])
    assert whole.sentences == [*earlier.sentences, *since.sentences]
    assert whole.waits == [*earlier.waits, *since.waits]


@given(journals(), st.integers(1, 3))
@settings(max_examples=examples(100), deadline=None)
def test_a_live_run_keeps_the_latest_of_what_a_report_has_all_of(rows, num_kept):
    live, whole = RunState(num_kept), RunState.of(rows)
    for each in rows:
        live.on_event(read_event(each))
    for name in ("profiles", "resizes", "waits", "sentences"):
        assert getattr(live, name) == getattr(whole, name)[-num_kept:]
    assert live.instances == {name: each for name, each in whole.instances.items() if each.ended_s is None}


def test_servers_are_those_that_have_joined_and_not_left():
    state = RunState()
    for event in (
        ServerJoined("a", "http://a", 1, 0.5),
        ServerJoined("b", "http://b", 1, 0.5),
        ServerChanged("b", "ready", "suspect"),
        ServerJoined("c", "http://c", 1, 0.5),
        ServerLeft("a", True),
    ):
        state.apply(event)
    assert state.servers == {"b": "suspect", "c": "ready"}


def test_instances_are_there_from_their_beginning_to_their_end():
    rows = [row(1000.0, "setting"), row(1002.0, "switched"), row(1003.0, "slot_lost"), row(1004.0, "slot_lost")]
    state = RunState.of(rows)
    assert [(each.instance, each.began_s, each.ended_s) for each in state.instances.values()] == [
        (FIRST[0], 0.0, 2.0),
        (FIRST[1], 0.0, 3.0),
        (NEW, 2.0, None),
    ]


def test_a_lost_slot_is_restarting_once_that_is_told_until_it_is_back_or_given_back():
    lost, more = {"slot": 2, "roles": ["generate"]}, {"device": "cpu", "pid": 7, "seconds": 0.5, "num_attempts": 1}
    state = RunState.of([row(1000.0, "slot_lost", **lost)])
    assert (state.restarting, state.given_back) == (set(), set()), "who does not come back is lost"
    state.apply(read_event(row(1001.0, "slot_restarting", "", slot=2)))
    assert (state.restarting, state.given_back) == ({2}, set())
    state.apply(read_event(row(1002.0, "slot_restarted", **lost, **more, began=[])))
    assert (state.restarting, state.given_back) == (set(), set())
    state.apply(read_event(row(1003.0, "slot_restarting", "", slot=2)))
    for kind in ("slot_lost", "slot_given_back"):
        state.apply(read_event(row(1003.0, kind, **lost)))
    assert (state.restarting, state.given_back) == (set(), {2})


@pytest.mark.parametrize("kind", ["setting", "profile"])
def test_what_another_version_wrote_is_told_until_the_next_start(kind):
    strange = row(1001.0, kind, strange=1)
    state = RunState.of([row(1000.0, "setting"), strange])
    assert "KeyError" in state.unreadable
    state.apply(read_event(row(1002.0, "setting")))
    assert (state.unreadable, state.began_s) == ("", 1002.0)
    assert list(state.instances) == [each.id for each in FIRST]
