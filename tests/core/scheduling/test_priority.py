from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ductile.core.rollouts.priority import priority

GROUP_SIZE = 4
TURNS_AND_SIBLINGS = st.tuples(st.integers(0, 50), st.integers(0, GROUP_SIZE))


def test_more_finished_turns_go_first_and_then_the_group_that_is_nearly_whole():
    found = [priority(turns, siblings, GROUP_SIZE) for turns, siblings in product(range(3), range(GROUP_SIZE + 1))]
    assert found == sorted(set(found))


@given(TURNS_AND_SIBLINGS, TURNS_AND_SIBLINGS)
def test_no_number_of_siblings_outweighs_a_turn(one, other):
    assert (priority(*one, GROUP_SIZE) > priority(*other, GROUP_SIZE)) == (one > other)
