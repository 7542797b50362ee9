"""Any box in any two memories: its slabs are its elements in order, wherever they lie, and each of them is small."""

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.geometry.holdings import View
from ductile.fabric import slabs as module
from ductile.fabric.slabs import Slab, slabs


def lying(draw: st.DrawFn, shape: tuple[int, ...]) -> View:
    """Somewhere: with its dims in any order, and gaps between its rows."""
    strides, step = [0] * len(shape), draw(st.sampled_from((1, 1, 1, 2)))
    order = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else range(len(shape))
    for dim in reversed(order):
        strides[dim] = step
        step = step * shape[dim] + draw(st.sampled_from((0, 0, 1, 9)))
    return View(0, draw(st.integers(0, 5)), shape, tuple(strides))


@st.composite
def cases(draw: st.DrawFn) -> tuple[View, View, int]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    return lying(draw, shape), lying(draw, shape), draw(st.sampled_from((1, 2, 4, 8)))


def memory_of(view: View, item_bytes: int) -> np.ndarray:
    size = view.offset + 1 + sum((length - 1) * step for length, step in zip(view.shape, view.strides, strict=True))
    return np.zeros((size + 3) * item_bytes, dtype=np.uint8)


def box(view: View, memory: np.ndarray, item_bytes: int) -> np.ndarray:
    strides = [stride * item_bytes for stride in view.strides]
    return np.ndarray(view.shape, f"u{item_bytes}", memory, view.offset * item_bytes, strides)


@given(cases(), st.sampled_from((8, 24, 100)), st.sampled_from((1, 3, 1024)), st.sampled_from((0, 8, 100)))
def test_slabs_are_the_box_in_order(
    case: tuple[View, View, int], slab_bytes: int, most_pieces: int, gap_bytes: int
) -> None:
    there, here, item_bytes = case
    source, target = memory_of(there, item_bytes), memory_of(here, item_bytes)
    source[:] = np.random.default_rng(0).integers(1, 256, len(source))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLAB_BYTES", slab_bytes)
        patch.setattr(module, "ACROSS_BYTES", 4 * slab_bytes)
        patch.setattr(module, "MAX_PIECES", most_pieces)
        patch.setattr(module, "GAP_BYTES", gap_bytes)
        found = [(slab, read(slab, source)) for slab in slabs(there, here, item_bytes)]
        assert all(slab.num_bytes <= slab_bytes and len(slab.pieces) <= most_pieces for slab, _ in found)
        assert all(slab.pieces[:, 1].sum() == slab.num_bytes or slab.across for slab, _ in found)
        assert all(slab.pieces[:, 1].sum() <= 4 * slab_bytes for slab, _ in found)
    for slab, content in found:
        slab.lying_here(target)[...] = content
        assert slab.is_whole == slab.lying_here(target).flags.c_contiguous
    packed = b"".join(content.tobytes() for _, content in found)
    assert packed == box(there, source, item_bytes).tobytes() == box(here, target, item_bytes).tobytes()
    assert np.count_nonzero(target) == prod(there.shape) * item_bytes, "something was written beside the box"


def read(slab: Slab, source: np.ndarray) -> np.ndarray:
    """A slab's elements, from the pieces alone."""
    came = np.concatenate([source[offset : offset + size] for offset, size in slab.pieces.tolist()])
    return slab.lying_there(came, 0) if slab.across else slab.packed(came, 0)


CONTIGUOUS = View(0, 0, (4, 6), (6, 1))


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (CONTIGUOUS, [(0, 96)]),
        (View(0, 2, (4, 3), (6, 1)), [(8, 12), (32, 12), (56, 12), (80, 12)]),
        (View(0, 12, (2, 6), (6, 1)), [(48, 48)]),
        (View(0, 0, (2, 2, 6), (24, 6, 1)), [(0, 48), (96, 48)]),
        (View(0, 5, (1, 1, 1), (24, 6, 1)), [(20, 4)]),
        (View(0, 1, (3,), (2,)), [(4, 4), (12, 4), (20, 4)]),
        (View(0, 0, (2, 2), (1, 3)), [(0, 4), (12, 4), (4, 4), (16, 4)]),
    ],
    ids=["whole", "columns", "rows", "two stretches", "one item", "every other item", "transposed"],
)
def test_a_box_in_pieces(view: View, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GAP_BYTES", 0)
    (slab,) = slabs(view, View(0, 0, view.shape, (100,) * len(view.shape)), 4)
    assert [tuple(piece) for piece in slab.pieces.tolist()] == expected


@pytest.mark.parametrize(
    ("row", "pitch", "across"),
    [(256, 512, True), (700, 1400, False), (16, 1024, False), (64, 65, True), (1 << 20, (1 << 20) + 8, False)],
    ids=["half a row of 2 KiB", "half a row of 5.5 KiB", "a sixty-fourth", "padded rows", "rows longer than a slab"],
)
def test_short_rows_that_lie_close_together_are_read_as_one(row: int, pitch: int, across: bool) -> None:
    there, here = View(0, 0, (1000, row), (pitch, 1)), View(0, 0, (1000, row), (row, 1))
    found = list(slabs(there, here, 4))
    assert {slab.across for slab in found} == {across}
    assert all(slab.is_whole for slab in found)
    assert all(a.here + a.num_bytes == b.here for a, b in pairwise(found))
    if across:
        assert all(slab.pieces.tolist() == [[slab.there, slab.span_bytes]] for slab in found)
