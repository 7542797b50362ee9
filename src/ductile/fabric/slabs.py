"""A box that lies in two memories, cut into slabs: pieces so small that each is hashed while it is in a core's cache.

    for slab in slabs(there, here, item_bytes):
        slab.pieces      the stretches of the other memory that hold it, for the kernel to read
        slab.across      whether they are read as one, with what lies between them
        slab.is_whole    whether it lies in one stretch in this memory

The slabs of a box, one after the other, are its elements in row-major order, however they lie on either side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ductile.core.layout.geometry.holdings import Ints, View

SLAB_BYTES = 512 << 10
"""Largest slab. It stays in the cache (2 MiB a core) until it is hashed and put in its place. Half of it costs 3 %."""
MAX_PIECES = 1024
"""Most stretches of either side that the kernel takes in one call."""
GAP_BYTES = 2048
"""Mean gap between stretches up to which they are read as one, gaps included: the kernel reads about so much while it
looks up where the next stretch lies. Rows of 1 KiB come at 2.7 GB/s across gaps of 1 KiB and at 2.3 one by one, rows of
2.75 KiB across such gaps at 2.6 and 2.9."""
ACROSS_BYTES = 2 * SLAB_BYTES
"""The most that is read for one slab, gaps included."""


class Dim(NamedTuple):
    """A dim of a slab: its length, and its strides in the other memory and in this one, in bytes."""

    length: int
    there: int
    here: int


@dataclass(frozen=True)
class Slab:
    """Consecutive elements of a box. Offsets count bytes from the beginning of the buffer that it lies in."""

    there: int
    here: int
    dims: tuple[Dim, ...]
    """Dims from the outermost to the innermost; neighbours that are contiguous in both memories are joined."""
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        return prod(dim.length for dim in self.dims) * self.item_bytes

    @cached_property
    def is_whole(self) -> bool:
        return _run(self.dims, [dim.here for dim in self.dims], self.item_bytes) == self.num_bytes

    @cached_property
    def across(self) -> bool:
        """Whether the slab is read as one stretch, gaps included: short stretches close together are read faster so."""
        num_gaps = self.num_bytes // self._run_bytes - 1
        return (
            num_gaps > 0
            and self.span_bytes <= ACROSS_BYTES
            and self.span_bytes - self.num_bytes <= num_gaps * GAP_BYTES
        )

    @property
    def span_bytes(self) -> int:
        """Bytes from the slab's first to its last in the other memory."""
        return sum((dim.length - 1) * dim.there for dim in self.dims) + self.item_bytes

    @cached_property
    def pieces(self) -> Ints:
        """Stretches to read of the other memory, in row-major order: [pieces, (offset, bytes)]."""
        if self.across:
            return np.array([[self.there, self.span_bytes]], dtype=np.int64)
        run_bytes, starts = self._run_bytes, np.array([self.there], dtype=np.int64)
        left = self.num_bytes // run_bytes
        for dim in self.dims:
            if left == 1:
                break
            starts = (starts[:, None] + np.arange(dim.length, dtype=np.int64) * dim.there).reshape(-1)
            left //= dim.length
        return np.stack([starts, np.full(len(starts), run_bytes, dtype=np.int64)], axis=1)

    def lying_there(self, memory: NDArray[np.uint8], offset: int) -> NDArray[Any]:
        """The slab's elements in bytes that were read across, from `offset` on."""
        return self._view(memory, offset, [dim.there for dim in self.dims])

    def lying_here(self, memory: NDArray[np.uint8]) -> NDArray[Any]:
        """The slab's elements where they belong in this memory."""
        return self._view(memory, self.here, [dim.here for dim in self.dims])

    def packed(self, memory: NDArray[np.uint8], offset: int) -> NDArray[Any]:
        """The slab's elements end to end, from `offset` on."""
        return self._view(memory, offset, None)

    def _view(self, memory: NDArray[np.uint8], offset: int, strides: list[int] | None) -> NDArray[Any]:
        return np.ndarray([dim.length for dim in self.dims], f"u{self.item_bytes}", memory, offset, strides)

    @cached_property
    def _run_bytes(self) -> int:
        return _run(self.dims, [dim.there for dim in self.dims], self.item_bytes)


def slabs(there: View, here: View, item_bytes: int) -> Iterator[Slab]:
    """A box, by where it lies in each of two memories, in slabs of at most SLAB_BYTES and MAX_PIECES."""
    dims = _joined(there, here, item_bytes)
    most_bytes = min(SLAB_BYTES, MAX_PIECES * _run(dims, [dim.there for dim in dims], item_bytes))
    for at_there, at_here, part in _cut(tuple(dims), most_bytes // item_bytes):
        yield Slab(there.offset * item_bytes + at_there, here.offset * item_bytes + at_here, part, item_bytes)


def _joined(there: View, here: View, item_bytes: int) -> list[Dim]:
    """Dims of both views, from the outermost to the innermost; neighbours that are contiguous in both are joined."""
    dims: list[Dim] = []
    for length, far, near in reversed(list(zip(there.shape, there.strides, here.strides, strict=True))):
        dim = Dim(length, far * item_bytes, near * item_bytes)
        if length == 1:
            continue
        if dims and (dim.there, dim.here) == (dims[-1].length * dims[-1].there, dims[-1].length * dims[-1].here):
            dims[-1] = Dim(length * dims[-1].length, dims[-1].there, dims[-1].here)
        else:
            dims.append(dim)
    return dims[::-1]


def _cut(dims: tuple[Dim, ...], most_items: int) -> Iterator[tuple[int, int, tuple[Dim, ...]]]:
    """(offset there, offset here, dims) of consecutive parts of at most so many items."""
    num_items = prod(dim.length for dim in dims)
    if num_items <= most_items:
        yield 0, 0, dims
        return
    outer, *rest = dims
    inner = num_items // outer.length
    if inner > most_items:
        for index in range(outer.length):
            for there, here, part in _cut(tuple(rest), most_items):
                yield index * outer.there + there, index * outer.here + here, part
        return
    step = most_items // inner
    for first in range(0, outer.length, step):
        count = min(step, outer.length - first)
        yield first * outer.there, first * outer.here, (Dim(count, outer.there, outer.here), *rest)


def _run(dims: Sequence[Dim], strides: Sequence[int], item_bytes: int) -> int:
    """How many bytes lie in one stretch in the memory with these strides."""
    run_bytes = item_bytes
    for dim, stride in zip(reversed(dims), reversed(strides), strict=True):
        if dim.length > 1 and stride != run_bytes:
            break
        run_bytes *= dim.length
    return run_bytes
