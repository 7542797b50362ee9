"""Scattered reads out of a process: here our own, which the kernel treats like any other."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.holdings import View
from ductile.fabric import peer_memory
from ductile.fabric.memory import flat_bytes, num_bytes, pack, slabs, unpack
from ductile.fabric.peer_memory import pieces_of, read
from ductile.fabric.process import Process
from tests.ranks import start, stop


def pieces(base: int, lengths: list[int], gap: int) -> np.ndarray:
    """Stretches of these lengths with a gap after each, from `base` on."""
    starts = base + np.cumsum([0, *(length + gap for length in lengths[:-1])])
    return np.stack([starts, np.array(lengths)], axis=1).astype(np.int64)


def cut(total: int, borders: set[int]) -> list[int]:
    points = [0, *sorted(border for border in borders if border < total), total]
    return np.diff(points).tolist()


@given(
    st.integers(1, 3000),
    st.sets(st.integers(1, 2999)),
    st.sets(st.integers(1, 2999)),
    st.integers(1, 5),
    st.sampled_from((1, 2, 7, 1024)),
    st.sampled_from((1, 10, 1 << 30)),
)
def test_any_two_ways_of_scattering_the_same_bytes(
    total: int, ours: set[int], theirs: set[int], gap: int, most_pieces: int, most_bytes: int
) -> None:
    here, there = cut(total, ours), cut(total, theirs)
    source = np.random.default_rng(0).integers(0, 256, total + gap * len(there), dtype=np.uint8)
    target = np.zeros(total + gap * len(here), dtype=np.uint8)
    remote, local = pieces(source.ctypes.data, there, gap), pieces(target.ctypes.data, here, gap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "MAX_PIECES", most_pieces)
        patch.setattr(peer_memory, "MAX_BYTES", most_bytes if total < 300 else 1 << 30)
        read(Process.own(), local, remote)

    def joined(data: np.ndarray, lengths: list[int]) -> np.ndarray:
        ends = np.cumsum([length + gap for length in lengths])
        return np.concatenate(
            [data[end - gap - length : end - gap] for end, length in zip(ends, lengths, strict=True)]
        )  # fmt: skip

    np.testing.assert_array_equal(joined(target, here), joined(source, there))
    assert target.sum() == joined(target, here).sum(), "something was written into a gap"


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (View(0, 0, (4, 6), (6, 1)), [(0, 96)]),
        (View(0, 2, (4, 3), (6, 1)), [(8, 12), (32, 12), (56, 12), (80, 12)]),
        (View(0, 12, (2, 6), (6, 1)), [(48, 48)]),
        (View(0, 0, (2, 2, 6), (24, 6, 1)), [(0, 48), (96, 48)]),
        (View(0, 5, (1, 1, 1), (24, 6, 1)), [(20, 4)]),
        (View(0, 1, (3,), (2,)), [(4, 4), (12, 4), (20, 4)]),
        (View(0, 0, (2, 2), (1, 2)), [(0, 4), (8, 4), (4, 4), (12, 4)]),
    ],
    ids=["whole", "columns", "rows", "two stretches", "one item", "every other item", "transposed"],
)
def test_a_box_in_pieces(view: View, expected: list[tuple[int, int]]) -> None:
    assert [tuple(piece) for piece in pieces_of(view, 1000, 4).tolist()] == [(1000 + at, size) for at, size in expected]


def sleep_on() -> None:
    os.read(os.pipe()[0], 1)


def test_a_process_is_known_by_its_start() -> None:
    process, _ = start(sleep_on)
    assert process.pid is not None
    found = np.array([[np.zeros(1).ctypes.data, 8]])
    mine = Process(process.pid, Process.own().started)
    assert not mine.alive, "the number is right, the start is not"
    process.kill()
    stop(process)
    with pytest.raises(ProcessLookupError):
        read(mine, found, found)


def test_an_address_that_nobody_has() -> None:
    target = np.zeros(8, dtype=np.uint8)
    with pytest.raises(OSError, match="Bad address"):
        read(Process.own(), np.array([[target.ctypes.data, 8]]), np.array([[4096, 8]]))


@pytest.mark.parametrize("most_bytes", [1, 8, 40, 100, 10_000])
def test_slabs_are_the_box_in_order(most_bytes: int) -> None:
    box = torch.arange(5 * 7 * 6, dtype=torch.int32).view(5, 7, 6)[1:4, :, 2:5]
    found = list(slabs(box, most_bytes))
    assert torch.equal(torch.cat([slab.reshape(-1) for slab in found]), box.reshape(-1))
    assert max(map(num_bytes, found)) <= max(most_bytes, 3 * 4)


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_packing_at_any_place_and_back(offset: int) -> None:
    box = torch.arange(24, dtype=torch.int64).view(4, 6)[1:3, ::2]
    staging = torch.zeros(offset + num_bytes(box), dtype=torch.uint8)
    pack(box, staging[offset:])
    back = torch.zeros(4, 6, dtype=torch.int64)[1:3, ::2]
    unpack(staging[offset:], back)
    assert torch.equal(back, box)
    assert flat_bytes(box) is None
    assert flat_bytes(back.contiguous()) is not None
