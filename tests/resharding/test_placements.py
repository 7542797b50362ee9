"""Placements against torch's own chunking, carried out on rows that know their number."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ductile.resharding.placements import Cut, held_runs

unhurried = settings(deadline=None, derandomize=True)


def chunks(rows: Tensor, size: int) -> list[Tensor]:
    """torch.chunk returns fewer chunks than asked for when nothing is left: the others are empty."""
    found = list(torch.chunk(rows, size))
    return found + [rows[:0]] * (size - len(found))


def strided(rows: Tensor, size: int, strips: int) -> list[Tensor]:
    """Chunk `c` of `size` of every strip, one after the other."""
    parts = [chunks(strip, size) for strip in chunks(rows, strips)]
    return [torch.cat([part[coordinate] for part in parts]) for coordinate in range(size)]


def held(length: int, cuts: list[Cut], local_length: int) -> tuple[list[int], list[int]]:
    """Global and local row numbers of the runs."""
    (runs,) = held_runs((length,), cuts, (local_length,))
    globally = [start + index for start, _, count in runs for index in range(count)]
    locally = [start + index for _, start, count in runs for index in range(count)]
    return globally, locally


@unhurried
@given(st.integers(1, 60), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_chunks_of_chunks(length: int, sizes: list[int], data: st.DataObject) -> None:
    coordinates = [data.draw(st.integers(0, size - 1)) for size in sizes]
    rows = torch.arange(length)
    for size, coordinate in zip(sizes, coordinates, strict=True):
        rows = chunks(rows, size)[coordinate]
    cuts = [Cut(0, size, coordinate) for size, coordinate in zip(sizes, coordinates, strict=True)]
    assert held(length, cuts, len(rows)) == (rows.tolist(), list(range(len(rows))))


@unhurried
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 6))
def test_fsdp_on_tensor_parallelism_is_chunks_of_what_tp_left(length: int, tp: int, fsdp: int) -> None:
    """Sizes that do not divide included: there the written order of placements would give other rows."""
    for t in range(tp):
        for f in range(fsdp):
            rows = chunks(chunks(torch.arange(length), tp)[t], fsdp)[f]
            cuts = [Cut(0, fsdp, f, strips=tp), Cut(0, tp, t)]
            assert held(length, cuts, len(rows)) == (rows.tolist(), list(range(len(rows))))


def held_or_none(length: int, cuts: list[Cut], local_length: int) -> list[int] | None:
    try:
        return held(length, cuts, local_length)[0]
    except ValueError:
        return None


@unhurried
@example(38, 4, 4)  # one of four ranks could not tell by its own shape
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 6))
def test_what_was_cut_in_the_written_order_is_the_same_or_refused(length: int, tp: int, fsdp: int) -> None:
    for f, strips in enumerate(strided(torch.arange(length), fsdp, tp)):
        written = chunks(strips, tp)
        found = [
            held_or_none(length, [Cut(0, fsdp, f, tp), Cut(0, tp, t)], len(rows)) for t, rows in enumerate(written)
        ]
        assert found == [rows.tolist() for rows in written] or (None in found and length % (tp * fsdp))


@unhurried
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 5))
def test_a_strided_shard_alone_holds_a_part_of_every_strip(length: int, size: int, strips: int) -> None:
    for coordinate, rows in enumerate(strided(torch.arange(length), size, strips)):
        found = held(length, [Cut(0, size, coordinate, strips)], len(rows))
        assert found == (rows.tolist(), list(range(len(rows))))


def test_three_axes_on_one_dim() -> None:
    """HSDP's replicas cut nothing; experts, tensor parallelism and FSDP2 cut dim 0 in that order."""
    for coordinate in range(8):
        f, e, t = coordinate // 4, coordinate // 2 % 2, coordinate % 2
        rows = chunks(chunks(chunks(torch.arange(21), 2)[e], 2)[t], 2)[f]
        cuts = [Cut(0, 2, f, strips=4), Cut(0, 2, e), Cut(0, 2, t)]
        assert held(21, cuts, len(rows))[0] == rows.tolist()


def test_runs_that_touch_are_one() -> None:
    assert held_runs((8, 6), [Cut(0, 2, 1, strips=2), Cut(0, 2, 1)], (2, 6)) == [[(6, 0, 2)], [(0, 0, 6)]]
    assert held_runs((8,), [Cut(0, 1, 0, strips=4)], (8,)) == [[(0, 0, 8)]]


def test_an_empty_part_has_no_runs_however_its_emptiness_is_written() -> None:
    for shape in ((0, 4), (0,)):
        assert held_runs((3, 4), [Cut(0, 4, 3)], shape)[0] == []


def test_a_local_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"local tensor has shape \[3, 4\]; its placements leave \[2, 4\]"):
        held_runs((8, 4), [Cut(0, 4, 1)], (3, 4))
