"""One layout of every axis: coordinates, groups, who has which samples and which experts, and what cannot be."""

import re
from dataclasses import asdict, replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.geometry.parallel_layout import AXES, EXPERTS, ParallelDims, ParallelLayout, ResizeOrder

EIGHT = ParallelLayout.of(range(8), dp_replicate=2, tp=2)
"""(dp_replicate, dp_shard, tp) of slots 0 to 7: 000, 001, 010, 011, 100, 101, 110, 111."""


def test_dp_shard_is_what_the_other_axes_leave() -> None:
    assert EIGHT.dims == ParallelDims(dp_replicate=2, dp_shard=2, tp=2)
    assert ParallelLayout.of((4, 2)).dims == ParallelDims(dp_shard=2)
    assert ParallelLayout.of(range(24), pp=2, cp=3, tp=4, ep=2).dims == ParallelDims(2, 1, 1, 3, 4, 2)
    assert EIGHT.on((9, 5, 7, 6)).dims == ParallelDims(dp_replicate=2, dp_shard=1, tp=2)
    assert EIGHT.on((9, 5, 7, 6), dp_replicate=1).dims == ParallelDims(dp_shard=2, tp=2)


def test_coordinates_and_groups() -> None:
    assert EIGHT.coordinates(5) == {"pp": 0, "dp_replicate": 1, "dp_shard": 0, "cp": 0, "tp": 1}
    groups = {axes: EIGHT.group(5, axes) for axes in [("tp",), ("dp_shard",), ("dp_replicate",), ("cp",)]}
    assert groups == {("tp",): (4, 5), ("dp_shard",): (5, 7), ("dp_replicate",): (1, 5), ("cp",): (5,)}
    assert EIGHT.group(5, ("dp_replicate", "dp_shard")) == EIGHT.group(5, ("dp_shard", "dp_replicate")) == (1, 3, 5, 7)
    assert EIGHT.group(5, AXES) == EIGHT.slots
    for axes, strange in ((("dp",), "dp"), (("dp_replicat", "tp"), "dp_replicat"), (("ep", "dp_shard"), "dp_shard")):
        with pytest.raises(ValueError, match=f"{strange}: no axis of this mesh, which has pp, dp_replicate"):
            EIGHT.group(5, axes)


@pytest.mark.parametrize(
    ("layout", "rank_of"),
    [
        (ParallelLayout.of((4, 2, 7)), {4: 0, 2: 1, 7: 2}),
        (ParallelLayout.of((3, 1, 0, 2), dp_replicate=2), {3: 0, 1: 1, 0: 2, 2: 3}),
        (EIGHT, {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3}),
        (ParallelLayout.of(range(8), pp=2, cp=2), {0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 5: 0, 6: 1, 7: 1}),
    ],
)
def test_slots_that_differ_in_pp_cp_or_tp_have_the_same_part_of_a_batch(
    layout: ParallelLayout, rank_of: dict[int, int]
) -> None:
    assert {slot: layout.data_parallel_rank(slot) for slot in layout.slots} == rank_of
    assert layout.num_data_parallel == len({*rank_of.values()})
    parts = [f"part {rank}" for rank in range(layout.num_data_parallel)]
    assert layout.deal(parts) == {slot: f"part {rank}" for slot, rank in rank_of.items()}


def test_of_slots_with_the_same_samples_those_of_one_count() -> None:
    layout = ParallelLayout.of(range(32), pp=2, dp_replicate=2, cp=2, tp=2)
    counting = [slot for slot in layout.slots if layout.counts_samples(slot)]
    assert [layout.data_parallel_rank(slot) for slot in counting] == list(range(layout.num_data_parallel))
    assert {layout.coordinates(slot)["pp"] for slot in counting} == {1}, "the last stage has the loss"


def test_experts_take_the_innermost_slots_of_dp_shard_cp_and_tp() -> None:
    layout = ParallelLayout.of(range(16), dp_replicate=2, cp=2, tp=2, ep=4)
    assert layout.expert_mesh.axes == (("pp", 1), ("dp_replicate", 2), ("expert_shard", 2), ("ep", 4))
    assert layout.group(5, ("ep",)) == (4, 5, 6, 7)
    assert layout.group(5, ("expert_shard",)) == (1, 5)
    assert layout.group(5, EXPERTS) == layout.group(5, ("dp_shard", "cp", "tp")) == tuple(range(8))


def test_the_first_slot_speaks_for_all() -> None:
    assert ParallelLayout.of((4, 2, 7)).first == 4
    assert [layout.num_shards for layout in (EIGHT, ParallelLayout.of((4, 2)))] == [4, 2]


@pytest.mark.parametrize(
    ("slots", "dims", "stages", "says"),
    [
        ((), ParallelDims(), (), "a layout needs at least one slot"),
        ((1, 1), ParallelDims(dp_shard=2), (), "a layout has each of its slots once, and 1 several times"),
        ((0,), ParallelDims(tp=0), (), "tp is 0 and must be at least 1"),
        ((0, 1, 2, 3), ParallelDims(pp=8), (), "the number of slots, 4, must be a multiple of pp 8"),
        ((0, 1, 2, 3), ParallelDims(tp=2), (), "dp_shard is 1 and must be 2, as the number of slots is 4"),
        ((0, 1), ParallelDims(tp=2, ep=4), (), "ep is 4 and must divide dp_shard · cp · tp, which is 2"),
        ((0, 1), ParallelDims(pp=2), (0, 0, 2), "the layers are on stages [0, 2] and must be on all of 0 to 1"),
    ],
)  # fmt: skip
def test_what_is_no_layout_is_refused(slots: tuple, dims: ParallelDims, stages: tuple, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        ParallelLayout(slots, dims, stages)


def test_all_that_is_wrong_is_said_at_once() -> None:
    sentences = [
        "a layout has each of its slots once, and 0 several times",
        "the number of slots, 3, must be a multiple of pp 2 · tp 2",
        "ep is 3 and must divide dp_shard · cp · tp, which is 2",
        "the layers are on stages [0] and must be on all of 0 to 1",
    ]
    with pytest.raises(ValueError, match=f"^{re.escape('; '.join(sentences))}$"):
        ParallelLayout((0, 0, 5), ParallelDims(pp=2, tp=2, ep=3), (0,))


SIZES = st.integers(1, 3)


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    sizes = {axis: draw(SIZES) for axis in AXES}
    around = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    sizes["ep"] = draw(st.sampled_from([size for size in range(1, around + 1) if around % size == 0]))
    num_slots = prod(sizes[axis] for axis in AXES)
    slots = draw(st.permutations(range(num_slots + 2)))[:num_slots]
    return ParallelLayout(tuple(slots), ParallelDims(**sizes))


@given(layouts(), st.sets(st.sampled_from(AXES)))
def test_the_groups_of_axes_are_a_partition_and_their_coordinates_differ_there_alone(
    layout: ParallelLayout, axes: set[str]
) -> None:
    groups = {slot: layout.group(slot, axes) for slot in layout.slots}
    coordinates = {slot: layout.coordinates(slot) for slot in layout.slots}
    assert all(groups[other] == group for group in groups.values() for other in group), "all of a group agree on it"
    for slot, group in groups.items():
        assert slot in group
        assert len(group) == prod(getattr(layout.dims, axis) for axis in axes)
        for other in group:
            assert {axis for axis in AXES if coordinates[slot][axis] != coordinates[other][axis]} <= axes


@given(layouts())
def test_every_coordinate_is_one_slots_and_every_part_of_a_batch_is_worked_on(layout: ParallelLayout) -> None:
    places = {tuple(layout.coordinates(slot).values()) for slot in layout.slots}
    assert len(places) == len(layout.slots) == prod(getattr(layout.dims, axis) for axis in AXES)
    assert {layout.data_parallel_rank(slot) for slot in layout.slots} == {*range(layout.num_data_parallel)}
    sizes = asdict(layout.dims)
    del sizes["dp_shard"]
    assert ParallelLayout.of(layout.slots, **sizes) == layout


@given(layouts(), layouts())
def test_an_order_has_all_slots_and_knows_who_joins_and_who_leaves(
    before: ParallelLayout, after: ParallelLayout
) -> None:
    order = ResizeOrder(1, before, after)
    assert {*order.slots} == {*before.slots, *after.slots}
    assert {*order.joiners} == {*after.slots} - {*before.slots}
    assert {*order.leavers} == {*before.slots} - {*after.slots}


def test_equal_layouts_are_equal_and_hash_alike() -> None:
    assert {EIGHT, ParallelLayout.of(range(8), dp_replicate=2, tp=2)} == {EIGHT}
    assert replace(EIGHT, slots=EIGHT.slots[::-1]) != EIGHT
