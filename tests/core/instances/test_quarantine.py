"""An address that loses its server again and again waits longer and longer, and is forgiven."""

from hypothesis import given
from hypothesis import strategies as st

from ductile.core.instances.quarantine import FlapRules, Quarantine

RULES = FlapRules(window_s=600.0, limit=3, backoff_s=30.0, max_rejoins=10)


def waits(losses: list[float]) -> list[float]:
    """Seconds of quarantine after each loss."""
    known, found = Quarantine(RULES), list[float]()
    for at in losses:
        known = known.lost("a", at)
        found.append(known.records["a"].until - at)
    return found


def test_it_waits_twice_as_long_each_time_up_to_the_window() -> None:
    assert waits([0, 1, 2, 40, 101, 222, 463, 944]) == [0, 0, 30, 60, 120, 240, 480, 600]


def test_a_loss_is_forgotten_after_each_window() -> None:
    assert waits([0, 1, 2, 700]) == [0, 0, 30, 30]
    assert waits([0, 1, 2, 3000]) == [0, 0, 30, 0]


def test_it_is_kept_out_in_words_and_others_are_not() -> None:
    known = Quarantine(RULES).lost("a", 0.0).lost("a", 1.0).lost("a", 2.0)
    assert known.why_not("a", 12.0) == "a has lost its server 3 times lately; it may join in 20 s"
    assert known.why_not("a", 32.0) == ""
    assert known.why_not("b", 12.0) == ""


def test_rejoins_are_capped_until_somebody_vouches_for_it() -> None:
    known = Quarantine(RULES)
    for number in range(11):
        known = known.lost("a", 10_000.0 * number)
    assert "ductile fleet join" in known.why_not("a", 1e9)
    assert known.vouched("a").why_not("a", 1e9) == ""


@given(st.lists(st.floats(0, 2000), max_size=40))
def test_no_quarantine_is_longer_than_the_window(gaps: list[float]) -> None:
    at, losses = 0.0, list[float]()
    for gap in gaps:
        at += gap
        losses.append(at)
    assert all(0 <= wait <= RULES.window_s + 1e-6 for wait in waits(losses))
