from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.core.layout.geometry.topology import Topology
from ductile.core.scheduling.facts.ledger import Ledger, SlotLedger, idle_cause

ACTIVITIES = ["train", "generate", "score", "publish", "switch", "idle"]
CAUSES = ["tail", "queue_full", "queue_empty", "waiting_for_batch", "held", "no_role", "other"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIVITIES), st.floats(0, 100))))
def test_every_second_belongs_to_exactly_one_activity(moves):
    now = 10.0
    ledger = SlotLedger.opened(3, now)
    for activity, after in moves:
        now += after
        ledger = ledger.switch(activity, now)
    assert sum(ledger.totals(now + 1).values()) == pytest.approx(now + 1 - 10)


def test_totals_by_activity():
    ledger = SlotLedger.opened(0, 0).switch("train", 2).switch("idle", 5).switch("train", 6)
    assert ledger.totals(8) == {"idle": 3, "train": 5}


def test_idle_seconds_by_cause():
    ledger = SlotLedger.opened(0, 0).switch("generate", 2).switch("idle", 5, "tail").switch("idle", 9, "queue_full")
    assert ledger.idle(10) == {"start_up": 2, "tail": 4, "queue_full": 1}


SLOTS = st.integers(0, 4)
MOVES = st.lists(
    st.tuples(SLOTS, st.sampled_from([*ACTIVITIES, "leaves", "comes"]), st.sampled_from(CAUSES), st.floats(0, 50))
)


@settings(deadline=None)
@given(MOVES)
def test_all_slots_together_add_up_to_what_there_was_to_spend(moves):
    """Slots come, leave and come back; the twin keeps a list of who was there when."""
    spans, now, present, spent = [], 5.0, {}, 0.0
    ledger = Ledger(on_span=spans.append)
    for slot, what, cause, after in moves:
        now += after
        if slot not in present:
            ledger.open(slot, now)
            present[slot] = now
        elif what == "leaves":
            ledger.close(slot, now)
            spent += now - present.pop(slot)
        elif what != "comes":
            ledger.switch(slot, what, now, cause)
    now += 1
    spent += sum(now - since for since in present.values())
    ledger.finish(now)
    assert ledger.slot_seconds(now) == pytest.approx(spent)
    assert sum(ledger.totals(now).values()) == pytest.approx(spent)
    nodes = ledger.totals_by_node(Topology.of(slots_per_node=2, num_nodes=3), now)
    assert sum(seconds for of_node in nodes.values() for seconds in of_node.values()) == pytest.approx(spent)
    assert sum(ledger.idle(now).values()) == pytest.approx(ledger.totals(now).get("idle", 0.0))
    assert sum(span.seconds for span in spans) == pytest.approx(spent)
    for slot in {span.slot for span in spans}:
        own = [span for span in spans if span.slot == slot]
        assert all(one.end_s <= other.start_s for one, other in pairwise(own))


@pytest.mark.parametrize(
    ("roles", "facts", "cause"),
    [
        ((), {}, "no_role"),
        (("generate",), {"others_decode": True}, "tail"),
        (("generate",), {}, "queue_full"),
        (("generate",), {"others_decode": True, "may_start": 3}, "queue_empty"),
        (("train",), {}, "waiting_for_batch"),
        (("train",), {"samples_ready": 9, "held": True}, "held"),
        (("train", "generate"), {"others_decode": True}, "tail"),
        (("train", "generate"), {"samples_ready": 9, "held": True}, "held"),
        (("score",), {"others_decode": True}, "queue_empty"),
    ],
)
def test_why_a_slot_is_idle(roles, facts, cause):
    facts = {"others_decode": False, "may_start": 0, "samples_ready": 0, "held": False, **facts}
    assert idle_cause(roles, **facts) == cause
