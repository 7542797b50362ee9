"""Shard steps against `torch.chunk` and against tables; hypothesis compares all of them with plain slicing
(`tests/core/transfer/test_plan_properties.py`)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.geometry.holdings import Holdings, interval_boxes, volume
from ductile.core.layout.geometry.layout import Tensor
from ductile.core.layout.geometry.mesh import Mesh
from ductile.core.layout.geometry.sharding import Shard, place
from tests.core.other_layouts import flatten, unstacked


def spans(holdings: Holdings, slot: int, dim: int = 0) -> list[tuple[int, int]]:
    return [(start[dim], stop[dim]) for start, stop, *_ in holdings.rows_of(slot)]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5))
def test_chunks_on_chunks_are_those_of_torch(length: int, tp: int, fsdp: int) -> None:
    mesh = Mesh.of(range(tp * fsdp), dp_shard=fsdp, tp=tp)
    holdings = place((length, 3), mesh, [Shard("tp"), Shard("dp_shard")])
    sizes = {slot: size for slot, _, size in holdings.sizes}
    for slot in mesh.slots:
        rows = torch.arange(length)
        for axis in ("tp", "dp_shard"):
            # torch.chunk returns fewer chunks than asked for when there is nothing left: the others are empty.
            chunks = torch.chunk(rows, mesh.size((axis,)))
            at = mesh.coordinate(slot, (axis,))
            rows = chunks[at] if at < len(chunks) else rows[:0]
        assert [row for start, stop in spans(holdings, slot) for row in range(start, stop)] == rows.tolist()
        assert sizes[slot] == 3 * len(rows)


@pytest.mark.parametrize(
    ("tp", "expected"),
    [  # 4 query heads and 2 key heads of size 2, fused: q is 0:8, k is 8:12, v is 12:16
        (1, [[(0, 8), (8, 12), (12, 16)]]),
        (2, [[(0, 4), (8, 10), (12, 14)], [(4, 8), (10, 12), (14, 16)]]),
        # More slots than key heads: neighbours hold the same one.
        (4, [[(0, 2), (8, 10), (12, 14)], [(2, 4), (8, 10), (12, 14)], [(4, 6), (10, 12), (14, 16)],
             [(6, 8), (10, 12), (14, 16)]]),
        (3, [[(0, 4), (8, 10), (12, 14)], [(4, 8), (10, 12), (14, 16)], []]),
    ],
)  # fmt: skip
def test_fused_heads_are_cut_by_component(tp: int, expected: list[list[tuple[int, int]]]) -> None:
    mesh = Mesh.of(range(tp), tp=tp)
    holdings = place((16, 5), mesh, [Shard("tp", 0, ((8, 4), (4, 2), (4, 2)))])
    assert [spans(holdings, slot) for slot in mesh.slots] == expected


def test_gate_and_up_lie_one_below_the_other_in_memory() -> None:
    holdings = place((8, 3), Mesh.of((5, 6), tp=2), [Shard("tp", 0, ((4, 4), (4, 4)))])
    assert holdings.rows_of(6) == [
        ((2, 0), (4, 3), 0, (3, 1), 0),
        ((6, 0), (8, 3), 6, (3, 1), 0),
    ]
    view = holdings.view(6, ((7, 1), (8, 3)))
    assert (view.offset, view.shape, view.strides) == (10, (1, 2), (3, 1))
    with pytest.raises(LookupError, match="slot 6 does not hold"):
        holdings.view(6, ((3, 0), (5, 3)))


def test_padding_is_memory_and_not_data() -> None:
    holdings = place((10, 2), Mesh.of(range(4), tp=4), [Shard("tp", 0, padded=16)])
    assert [spans(holdings, slot) for slot in range(4)] == [[(0, 4)], [(4, 8)], [(8, 10)], []]
    assert [size for _, _, size in holdings.sizes] == [8, 8, 8, 8]


def test_stages_hold_only_their_own() -> None:
    mesh = Mesh.of(range(4), pp=4)
    tied = place((6, 2), mesh, [], only=(("pp", (0, 3)),))
    assert tied.slots.tolist() == [0, 3]


def test_experts_in_one_tensor_or_in_many_are_the_same_boxes() -> None:
    mesh = Mesh.of(range(2), ep=2)
    stacked = place((4, 3, 2), mesh, [Shard("ep", 0)])
    single = unstacked(stacked)
    assert single.rows_of(1) == [
        ((2, 0, 0), (3, 3, 2), 0, (6, 2, 1), 2),
        ((3, 0, 0), (4, 3, 2), 0, (6, 2, 1), 3),
    ]
    assert single.sizes == ((0, 0, 6), (0, 1, 6), (1, 2, 6), (1, 3, 6))


@pytest.mark.parametrize(
    ("shard", "says"),
    [
        (Shard("tp", 2), "cuts dim 2"),
        (Shard("tp", 0, ((4, 4),)), "do not add up"),
        (Shard("tp", 0, ((4, 3), (4, 4))), "not a whole number of equal units"),
        (Shard("tp", 0, ((6, 3), (2, 2))), "cannot follow"),
        (Shard("tp", 0, padded=7), "never shorter"),
    ],
)
def test_steps_that_do_not_fit_are_refused(shard: Shard, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        place((8, 4), Mesh.of((0, 1), tp=2), [shard])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_an_interval_is_few_boxes_in_order(shape: list[int], data: st.DataObject) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    low = data.draw(st.integers(0, numbers.numel()))
    high = data.draw(st.integers(low, numbers.numel()))
    boxes = list(interval_boxes(shape, low, high))
    found = [numbers[tuple(slice(a, b) for a, b in zip(*box, strict=True))].flatten() for box in boxes]
    assert torch.cat([numbers.flatten()[:0], *found]).tolist() == list(range(low, high))
    assert len(boxes) <= 2 * len(shape) - 1
    assert sum(map(volume, boxes)) == high - low


def test_flat_ranges_cut_through_tensors() -> None:
    """b (6) then, from 8 on, a (4x3): 20 elements, padded to 24, in ranges of 8."""
    mesh = Mesh.of(range(3), dp_replicate=3)
    tensors = [Tensor(name, "float32", place(shape, mesh)) for name, shape in (("b", (6,)), ("a", (4, 3)))]
    b, a = flatten(tensors, mesh, ("dp_replicate",), "zero", align=4, multiple=8)
    assert [b.holdings.rows_of(slot) for slot in mesh.slots] == [[((0,), (6,), 0, (1,), 0)], [], []]
    assert a.holdings.rows_of(0) == []
    assert a.holdings.rows_of(1) == [((0, 0), (2, 3), 0, (3, 1), 0), ((2, 0), (3, 2), 6, (3, 1), 0)]
    assert a.holdings.rows_of(2) == [((2, 2), (3, 3), 0, (3, 1), 0), ((3, 0), (4, 3), 1, (3, 1), 0)]
    assert (a.buffer(0), a.holdings.sizes) == ("zero", ((1, 0, 8), (2, 0, 8)))


def test_only_replicas_can_be_flattened() -> None:
    mesh = Mesh.of(range(2), dp_replicate=2)
    tensor = Tensor("w", "float32", place((4,), mesh, [Shard("dp_replicate")]))
    with pytest.raises(ValueError, match="w: slots 0 and 1 hold different parts"):
        flatten([tensor], mesh, ("dp_replicate",), "zero")
