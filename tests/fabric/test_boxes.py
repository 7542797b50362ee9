"""Any box to any other of its shape, byte for byte as numpy does it, and not a byte beside it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.fabric import boxes

compiled = pytest.mark.skipif(boxes._boxes is None, reason="ductile.fabric._boxes was not built: no C compiler")
DTYPES = ("u1", "i2", "f4", "f8")


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(memory, box in it) of a target and of a source: boxes of one shape, cut out of larger arrays anywhere."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    row_bytes = draw(st.one_of(st.integers(8, 3000), st.integers(1 << 15, 1 << 16)))
    outer = draw(st.lists(st.integers(0, 11), max_size=3 if row_bytes < 3000 else 1))
    shape = (*outer, row_bytes // dtype.itemsize)
    found = []
    for seed in range(2):
        margins = [draw(st.integers(0, 3)) for _ in shape[:-1]] + [draw(st.sampled_from((0, 1, 16, 77)))]
        firsts = [draw(st.integers(0, margin)) for margin in margins]
        whole = [length + margin for length, margin in zip(shape, margins, strict=True)]
        misaligned = draw(st.sampled_from((0, 16, 64, 5, 63)))
        num_bytes = int(np.prod(whole)) * dtype.itemsize
        memory = np.random.default_rng(seed).integers(0, 256, misaligned + num_bytes, dtype=np.uint8)
        array = np.ndarray(whole, dtype, memory.data, misaligned)
        box = array[tuple(slice(first, first + length) for first, length in zip(firsts, shape, strict=True))]
        if len(shape) > 2 and draw(st.booleans()):
            box = box[::-1]
        found += [memory, box]
    return found[0], found[1], found[2], found[3]


@compiled
@given(pairs(), st.sampled_from((16, 64)))
def test_every_byte_of_the_box_and_none_beside_it(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], most_store_bytes: int
) -> None:
    memory, target, _, source = case
    before, kept = memory.copy(), target.copy()
    np.copyto(target.view(f"u{target.itemsize}"), source.view(f"u{source.itemsize}"))
    expected = memory.copy()
    memory[:] = before
    assert target.tobytes() == kept.tobytes()
    boxes._boxes.copy(target, source, most_store_bytes)
    np.testing.assert_array_equal(memory, expected)


@compiled
@pytest.mark.parametrize(
    ("target", "source", "complaint"),
    [
        (np.zeros((4, 8)), np.zeros((4, 9)), "dim 1 of the target is 8 long, that of the source 9"),
        (np.zeros((4, 8)), np.zeros((3, 8)), "dim 0 of the target is 4 long, that of the source 3"),
        (np.zeros((4, 8)), np.zeros((8,)), "the target has 2 dims of 8-byte items, the source 1 of 8-byte items"),
        (np.zeros((4, 8), "f4"), np.zeros((4, 8)), "2 dims of 4-byte items, the source 2 of 8-byte items"),
        (np.zeros((4, 8)), np.zeros((4, 16))[:, ::2], "8 bytes apart in the target, 16 in the source"),
        (np.zeros((4, 8)), np.zeros((8, 4)).T, "the innermost dim is not contiguous"),
    ],
    ids=["columns", "rows", "dims", "items", "gaps", "transposed"],
)  # fmt: skip
def test_what_does_not_fit_is_refused(target: np.ndarray, source: np.ndarray, complaint: str) -> None:
    source[...] = 1
    with pytest.raises(ValueError, match=complaint):
        boxes._boxes.copy(target, source)
    assert not target.any()


@compiled
def test_a_target_that_must_not_be_written_to() -> None:
    read_only = np.frombuffer(bytes(64), dtype="f8")
    with pytest.raises((ValueError, BufferError), match="read-only"):
        boxes._boxes.copy(read_only, np.ones(8))
    assert not read_only.any()


class Counted:
    """The compiled part, and how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        self.calls += 1
        np.copyto(target, source)


KIB = 1024


@pytest.mark.parametrize(
    ("shape", "whole", "streamed"),
    [
        ((1024, 1 * KIB), (1024, 2 * KIB), True),
        ((512, 4 * KIB), (512, 8 * KIB), True),
        ((2, 256, 4 * KIB), (2, 256, 8 * KIB), True),
        ((1024, 2 * KIB), (1024, 2 * KIB), True),
        ((5, 256 * KIB), (5, 512 * KIB), True),
        ((64, 4 * KIB), (64, 8 * KIB), False),
        ((1 << 17, 16), (1 << 17, 32), False),
    ],
    ids=["rows of a KiB", "of four", "in three dims", "one piece", "long rows", "a small box", "tiny rows"],
)
@pytest.mark.parametrize("built", [True, False])
def test_large_boxes_go_past_the_cache_where_that_is_built(
    shape: tuple[int, ...], whole: tuple[int, ...], streamed: bool, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted()
    monkeypatch.setattr(boxes, "_boxes", counted if built else None)
    source = np.random.default_rng(0).integers(0, 256, whole, dtype=np.uint8)[..., : shape[-1]]
    target = np.zeros(shape, dtype=np.uint8)
    boxes.copy(target, source)
    np.testing.assert_array_equal(target, source)
    assert counted.calls == (streamed and built)


def test_every_other_item_is_for_numpy() -> None:
    source = np.arange(1 << 19, dtype="f8")[::2]
    target = np.zeros(1 << 18)
    boxes.copy(target, source)
    np.testing.assert_array_equal(target, source)
