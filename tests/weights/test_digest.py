"""A version has one digest however it is cut, and no other version has it."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ductile.fabric import boxes
from ductile.fabric.fingerprint import MODULUS, copy_and_sum, plain_weighted_sum, weighted_sum
from ductile.messages.updates import digest_number, digest_text, total_of
from ductile.weights.digest import box_digest, total, whole_digest

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn, torch.int64, torch.float64)
Box = tuple[tuple[int, ...], tuple[int, ...]]


def made(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


@st.composite
def versions(draw: st.DrawFn) -> dict[str, Tensor]:
    shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
    found = draw(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=4))
    return {f"layers.{place}.weight": made(*each, seed=place) for place, each in enumerate(found)}


def cut(draw: st.DrawFn, start: tuple[int, ...], stop: tuple[int, ...]) -> Iterator[Box]:
    """A box, cut at random until nothing is left to cut or chance ends it."""
    longest = [dim for dim, (low, high) in enumerate(zip(start, stop, strict=True)) if high - low > 1]
    if not longest or not draw(st.booleans()):
        yield start, stop
        return
    dim = draw(st.sampled_from(longest))
    at = draw(st.integers(start[dim] + 1, stop[dim] - 1))
    yield from cut(draw, start, (*stop[:dim], at, *stop[dim + 1 :]))
    yield from cut(draw, (*start[:dim], at, *start[dim + 1 :]), stop)


@given(versions(), st.data())
def test_any_cut_has_the_digest_of_the_whole(tensors: dict[str, Tensor], data: st.DataObject) -> None:
    parts = [
        box_digest(name, tensor[tuple(map(slice, start, stop))], start)
        for name, tensor in tensors.items()
        for start, stop in data.draw(st.composite(lambda draw, t=tensor: list(cut(draw, (0,) * t.dim(), t.shape)))())
    ]
    ranks = [parts[place::3] for place in range(3)]
    assert total(parts) == total_of(map(total, ranks)) == whole_digest(tensors.items())


def row(tensor: Tensor, index: int) -> Tensor:
    return tensor.view(torch.uint8).view(len(tensor), -1)[index]


def swapped_rows(tensors: dict[str, Tensor]) -> None:
    table = tensors["embed.weight"]
    table[[1, 2]] = table[[2, 1]]


def missing_rows(tensors: dict[str, Tensor]) -> None:
    tensors["embed.weight"] = tensors["embed.weight"][:-1]


def repeated_row(tensors: dict[str, Tensor]) -> None:
    tensors["embed.weight"][3] = tensors["embed.weight"][2]


def flipped_bit(tensors: dict[str, Tensor]) -> None:
    row(tensors["embed.weight"], 4)[5] ^= 1


def two_flipped_signs(tensors: dict[str, Tensor]) -> None:
    table = tensors["embed.weight"]
    table[0, :2] = -table[0, :2]


def each_others_names(tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.norm.weight"], tensors["layers.1.norm.weight"] = (
        tensors["layers.1.norm.weight"], tensors["layers.0.norm.weight"],
    )  # fmt: skip


def another_dtype(tensors: dict[str, Tensor]) -> None:
    tensors["embed.weight"] = tensors["embed.weight"].to(torch.float64)


@pytest.mark.parametrize(
    "wrong",
    [swapped_rows, missing_rows, repeated_row, flipped_bit, two_flipped_signs, each_others_names, another_dtype],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_wrong_shows(wrong: object, dtype: torch.dtype) -> None:
    def version() -> dict[str, Tensor]:
        torch.manual_seed(0)
        names = {"embed.weight": (9, 6), "layers.0.norm.weight": (6,), "layers.1.norm.weight": (6,)}
        return {name: torch.randn(shape).to(dtype) for name, shape in names.items()}

    tensors = version()
    wrong(tensors)  # pyright: ignore[reportCallIssue]
    assert whole_digest(tensors.items()) != whole_digest(version().items())


def test_a_digest_is_thirteen_digits_either_way() -> None:
    assert digest_text(-1) == "f" * 13
    assert digest_number(digest_text(255 + MODULUS)) == 255
    assert total([]) == "0" * 13


@pytest.mark.skipif(not boxes.built(), reason="ductile.fabric._boxes was not built: no C compiler")
@given(
    st.sampled_from((torch.uint8, torch.int16, torch.int32)),
    st.lists(st.integers(1, 70), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(0, 1 << 20),
    st.integers(0, 3),
)
def test_the_compiled_sum_is_that_of_torch(
    dtype: torch.dtype, shape: list[int], margin: int, first: int, widest: int
) -> None:
    whole = made(dtype, tuple(length + margin for length in shape), seed=first)
    box = whole[tuple(slice(margin, None) for _ in shape)]
    start = (first,) * len(shape)
    assert weighted_sum(box, start) % MODULUS == plain_weighted_sum(box, start) % MODULUS
    of_box = box.data_ptr(), box.shape, box.stride(), box.element_size(), start
    assert boxes._boxes.weighted_sum(*of_box, widest) == plain_weighted_sum(box, start) % MODULUS


@given(
    st.sampled_from((torch.uint8, torch.int16, torch.int32, torch.int64)),
    st.lists(st.integers(1, 140), min_size=1, max_size=3).filter(lambda shape: math.prod(shape) < 1 << 17),
    st.tuples(st.booleans(), st.booleans()),
    st.integers(0, 70),
    st.booleans(),
)
def test_a_copy_has_every_item_and_its_sum(
    dtype: torch.dtype, shape: list[int], turned: tuple[bool, bool], beside: int, past_cache: bool
) -> None:
    """However target and box lie: rows, columns, with others beside them, and at any address."""
    source, room = (_laid(dtype, shape, beside, turn and len(shape) > 1, seed) for seed, turn in enumerate(turned))
    before, inside = room[0].clone(), torch.zeros(room[0].shape, dtype=torch.bool)
    room[1](inside)[...] = True
    box, target = source[1](source[0]), room[1](room[0])
    start = tuple(range(5, 5 + len(shape)))
    assert copy_and_sum(target, box, start, past_cache) % MODULUS == plain_or_wide(box, start) % MODULUS
    assert torch.equal(target, box)
    assert torch.equal(room[0][~inside], before[~inside])


def _laid(
    dtype: torch.dtype, shape: list[int], beside: int, turned: bool, seed: int
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Memory, and what finds a box of a shape in it."""
    lying = [*shape[:-2], shape[-1], shape[-2]] if turned else shape
    whole = made(dtype, tuple(length + beside for length in lying), seed).clone()

    def box(of: Tensor) -> Tensor:
        part = of[tuple(slice(beside, None) for _ in lying)]
        return part.transpose(-1, -2) if turned else part

    return whole, box


def plain_or_wide(box: Tensor, start: tuple[int, ...]) -> int:
    return plain_weighted_sum(box, start) if box.element_size() < 8 else weighted_sum(box, start)


def test_extreme_items_are_summed_up_exactly() -> None:
    """What a processor adds up in lanes runs over in no way that shows."""
    for value in (-(1 << 15), (1 << 15) - 1, -1):
        box = torch.full((4, 5000), value, dtype=torch.int16)
        assert copy_and_sum(torch.zeros_like(box), box, (0, 0)) % MODULUS == plain_weighted_sum(box, (0, 0)) % MODULUS


@pytest.mark.skipif(not boxes.built(), reason="ductile.fabric._boxes was not built: no C compiler")
def test_what_the_compiled_part_cannot_do_it_leaves_alone() -> None:
    box, target = torch.ones((4, 8), dtype=torch.int16), torch.zeros((8, 16), dtype=torch.int16)
    for strides, to_strides, item_bytes in (
        ((8, 1), (32, 2), 2),  # gaps
        ((16, 2), (8, 1), 2),
        ((0, 1), (8, 1), 8),  # items of another kind
    ):
        copy = boxes.BoxCopy(target.data_ptr(), to_strides, box.data_ptr(), strides, (4, 8), item_bytes, (0, 0))
        assert boxes.copy_and_sum([copy], False) == [None]
        of_box = box.data_ptr(), (4, 8), strides, item_bytes, (0, 0)
        assert (boxes.weighted_sum(*of_box) is None) == (strides != (8, 1))
    assert not target.any()
    assert boxes.weighted_sum(box.data_ptr(), (0, 8), (8, 1), 2, (0, 0)) == 0
    for shape, start in (((4, 8), (0,)), ((4,), (0, 0)), ((4, 8), (0, 0, 0))):
        with pytest.raises(ValueError, match="different numbers of dims"):
            boxes.weighted_sum(box.data_ptr(), shape, (8, 1), 2, start)
    with pytest.raises(OverflowError):
        boxes.weighted_sum(box.data_ptr(), (4, 8), (8, 1), 2, (0, -1))


def test_of_many_boxes_each_has_its_own_sum_or_none() -> None:
    source = made(torch.int16, (6, 40), 1)
    target = torch.zeros_like(source)
    cut = [((0, 0), (2, 40)), ((2, 0), (6, 8)), ((2, 8), (6, 40))]
    copies = [
        boxes.BoxCopy(
            target[start[0] :, start[1] :].data_ptr(),
            (40, 1),
            source[start[0] :, start[1] :].data_ptr(),
            (40, 1),
            (stop[0] - start[0], stop[1] - start[1]),
            2 if number else 8,  # items of a kind that is not known there
            start,
        )
        for number, (start, stop) in enumerate(cut)
    ]
    found = boxes.copy_and_sum(copies, True)
    views = [source[tuple(map(slice, start, stop))] for start, stop in cut]
    sums = [plain_weighted_sum(view, start) % MODULUS for view, (start, _) in zip(views, cut, strict=True)]
    assert found == ([None, *sums[1:]] if boxes.built() else [None] * 3)
    if boxes.built():
        assert torch.equal(target[2:], source[2:])
    assert not target[:2].any()
    assert boxes.copy_and_sum([], False) == []


def test_a_copy_to_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError):
        copy_and_sum(torch.zeros((4, 9), dtype=torch.int16), torch.ones((4, 8), dtype=torch.int16), (0, 0))
