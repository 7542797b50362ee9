"""Choosing who takes which place of the target mesh."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.core.layout.geometry.layout import Layout, Tensor
from ductile.core.layout.geometry.mesh import Mesh
from ductile.core.layout.geometry.sharding import Shard, place
from ductile.core.transfer.assignment import arrange, best_assignment
from ductile.core.transfer.planning import Planner
from tests.core.other_layouts import relabelled
from tests.core.transfer.random_layouts import pairs
from tests.core.transfer.twin import Recipe
from tests.nightly import examples


def chunks(slots: range, length: int = 1200) -> Layout:
    holdings = place((length,), Mesh.of(slots, dp_shard=len(slots)), [Shard("dp_shard", 0)])
    return Layout([Tensor("w", "float32", holdings)], slots)


@given(
    st.integers(1, 5).flatmap(
        lambda rows: st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=rows, max_size=rows)
    )
)
def test_the_assignment_is_the_best_of_all(values: list[list[int]]) -> None:
    value = np.array(values)
    chosen = best_assignment(value)
    assert len(set(chosen.tolist())) == len(values)
    best = max(
        sum(int(value[row, column]) for row, column in enumerate(columns))
        for columns in permutations(range(5), len(values))
    )
    assert int(value[np.arange(len(values)), chosen].sum()) == best


@pytest.mark.parametrize(
    ("old", "new", "moves"),
    [
        (2, 3, 1 / 3),  # the newcomer goes in the middle; appended, half would move
        (4, 2, 1 / 2),  # of each new half, a quarter is in place already
        (1, 4, 3 / 4),
        (3, 3, 0.0),
    ],
)
def test_a_good_place_saves_traffic(old: int, new: int, moves: float) -> None:
    source, target = chunks(range(old)), chunks(range(new))
    target = relabelled(target, arrange(source, target, range(max(old, new))))
    plan = Planner().plan(source, target)
    assert plan.wire_bytes == pytest.approx(moves * 1200 * 4)


def test_a_slot_keeps_its_name_where_nothing_speaks_against_it() -> None:
    source, target = chunks(range(4)), chunks(range(4, 8))
    assert arrange(source, target) == {slot: slot for slot in range(4, 8)}
    assert arrange(chunks(range(4)), chunks(range(4))) == {slot: slot for slot in range(4)}


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="4 places need as many slots; 2 were given"):
        arrange(chunks(range(4)), chunks(range(4)), slots=(0, 1))


@given(pairs())
@settings(max_examples=examples(40), deadline=None, derandomize=True)
def test_arranging_never_moves_more(pair: tuple[Recipe, Recipe]) -> None:
    source, target = pair[0].layout(), pair[1].layout()
    arranged = relabelled(target, arrange(source, target))
    planner = Planner(round_bytes=1 << 20)
    assert planner.plan(source, arranged).wire_bytes <= planner.plan(source, target).wire_bytes
