from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.transfer.order import stays_put
from ductile.records import Formation

CASES = [
    # before, slots, replicas, after
    ((0, 1), 1, (0, 1, 2), 1, (0, 2, 1)),
    ((0, 1, 2, 3), 1, (0, 1, 2, 3), 1, (0, 1, 2, 3)),
    ((3, 1), 1, (1, 3), 1, (3, 1)),
    ((0, 1), 1, (2, 3), 1, (2, 3)),
    ((0, 1), 1, (0, 1, 2, 3), 2, (0, 1, 2, 3)),
    ((5, 2), 1, (2, 5, 7, 8), 2, (5, 2, 7, 8)),
]


@pytest.mark.parametrize(("members", "replicas", "slots", "new_replicas", "expected"), CASES)
def test_who_stays_where(members, replicas, slots, new_replicas, expected) -> None:
    before = Formation(members, replicas)
    assert kept(before, stays_put(before, slots, new_replicas)) == kept(before, Formation(expected, new_replicas))
    if new_replicas == replicas:
        assert stays_put(before, slots, new_replicas).members == expected


def kept(before: Formation, after: Formation) -> Fraction:
    """Of all that the slots need, how much they have: each holds an interval of the state."""

    def interval(formation: Formation, slot: int) -> tuple[Fraction, Fraction]:
        size = len(formation.members) // formation.replicas
        shard = formation.members.index(slot) % size
        return Fraction(shard, size), Fraction(shard + 1, size)

    total = Fraction(0)
    for slot in set(before.members) & set(after.members):
        (a, b), (x, y) = interval(before, slot), interval(after, slot)
        total += max(Fraction(0), min(b, y) - max(a, x))
    return total


@given(
    st.permutations(range(6)), st.integers(1, 4), st.integers(1, 5), st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)])
)
def test_no_other_order_keeps_more(slots, num_before, num_after, replicas) -> None:
    before = Formation(tuple(slots[: num_before * replicas[0]][: 6 // replicas[0] * replicas[0]]), replicas[0])
    num_after = min(num_after, 5 // replicas[1])
    others = slots[-num_after * replicas[1] :]
    ours = stays_put(before, others, replicas[1])
    assert sorted(ours.members) == sorted(others)
    best = max(kept(before, Formation(tuple(order), replicas[1])) for order in permutations(others))
    assert kept(before, ours) == best


def test_copies_must_be_equal() -> None:
    with pytest.raises(ValueError, match="3 slots cannot hold 2 equal copies"):
        stays_put(Formation((0, 1)), (0, 1, 2), 2)
