import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.cluster.ledger import SlotLedger


@given(st.lists(st.tuples(st.sampled_from(["train", "generate", "score", "publish", "idle"]), st.floats(0, 100))))
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
