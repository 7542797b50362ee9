from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.geometry.parallel_layout import ParallelDims, ParallelLayout
from ductile.core.transfer.order import stays_put

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
    before = ParallelLayout.of(members, dp_replicate=replicas)
    after = stays_put(before, before.on(slots, dp_replicate=new_replicas))
    assert kept(before, after) == kept(before, before.on(expected, dp_replicate=new_replicas))
    if new_replicas == replicas:
        assert after.slots == expected


def kept(before: ParallelLayout, after: ParallelLayout) -> Fraction:
    """Of all that the slots need, how much they have: each holds an interval of the state."""

    def interval(layout: ParallelLayout, slot: int) -> tuple[Fraction, Fraction]:
        size = layout.num_shards
        shard = layout.slots.index(slot) % size
        return Fraction(shard, size), Fraction(shard + 1, size)

    total = Fraction(0)
    for slot in set(before.slots) & set(after.slots):
        (a, b), (x, y) = interval(before, slot), interval(after, slot)
        total += max(Fraction(0), min(b, y) - max(a, x))
    return total


@given(
    st.permutations(range(6)), st.integers(1, 4), st.integers(1, 5), st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)])
)
def test_no_other_order_keeps_more(slots, num_before, num_after, replicas) -> None:
    first = slots[: num_before * replicas[0]][: 6 // replicas[0] * replicas[0]]
    before = ParallelLayout.of(first, dp_replicate=replicas[0])
    num_after = min(num_after, 5 // replicas[1])
    others = slots[-num_after * replicas[1] :]
    ours = stays_put(before, before.on(others, dp_replicate=replicas[1]))
    assert sorted(ours.slots) == sorted(others)
    best = max(kept(before, before.on(order, dp_replicate=replicas[1])) for order in permutations(others))
    assert kept(before, ours) == best


def test_stages_and_slots_of_tensor_parallelism_stay_too() -> None:
    """Two stages, each over two slots of tp, get a second shard: no slot changes its stage or its columns."""
    before = ParallelLayout.of((4, 5, 6, 7), pp=2, tp=2)
    after = stays_put(before, before.on(range(8)))
    assert after.dims == ParallelDims(pp=2, dp_shard=2, tp=2)
    for slot in before.slots:
        ours, theirs = before.coordinates(slot), after.coordinates(slot)
        assert (ours["pp"], ours["tp"]) == (theirs["pp"], theirs["tp"])
