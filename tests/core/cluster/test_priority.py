from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.core.cluster.priority import Waiting, ordered, priority

REQUESTS = st.lists(
    st.builds(Waiting, st.text("abc", max_size=3), st.floats(0, 9), st.integers(0, 5), st.integers(0, 4)), max_size=12
)


def test_more_finished_turns_go_first():
    requests = [Waiting("new", 0.0), Waiting("third", 5.0, num_turns=2), Waiting("second", 1.0, num_turns=1)]
    assert [each.id for each in ordered(requests)] == ["third", "second", "new"]


def test_among_equals_the_group_that_is_nearly_whole_and_then_who_waits_longest():
    requests = [Waiting("b", 2.0, 1, 0), Waiting("c", 3.0, 1, 3), Waiting("a", 1.0, 1, 0)]
    assert [each.id for each in ordered(requests)] == ["c", "a", "b"]


@settings(deadline=None)
@given(REQUESTS)
def test_the_number_says_the_same_as_the_order(requests):
    numbers = [priority(each.num_turns, each.siblings_finished, group_size=4) for each in ordered(requests)]
    assert numbers == sorted(numbers, reverse=True)


@settings(deadline=None)
@given(REQUESTS)
def test_the_order_does_not_depend_on_who_is_asked_first(requests):
    assert ordered(requests) == ordered(list(reversed(requests)))
