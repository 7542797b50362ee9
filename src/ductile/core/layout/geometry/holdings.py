"""Which slot holds which part of a tensor: a list of (global box <-> local strided view) for every slot.

All that a parallel layout does to a tensor ends as such rows; code that moves tensors needs to know nothing else:

    slot   global box            lies in its buffer at
       0   rows 0:4, cols 0:8    offset 0, strides (8, 1)
       1   rows 4:8, cols 0:8    offset 0, strides (8, 1)

All numbers count elements. Padding is not data: no row covers it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""(start, stop) of a block of a tensor, one number a dim."""


@dataclass(frozen=True, slots=True)
class View:
    """Place of a box in a slot's memory: `as_strided(buffer, shape, strides, offset)`."""

    buffer: int
    """Index into `Tensor.buffers` of the buffer in which the box lies."""
    offset: int
    shape: Shape
    strides: Shape


@dataclass(frozen=True, eq=False)
class Holdings:
    """Rows of every slot, ordered by slot: n rows, d dims of the tensor. A scalar is a tensor of shape (1,)."""

    shape: Shape
    slots: Ints
    """[n] slot that has each row."""
    start: Ints
    """[n, d] first index of each row's box along each dim."""
    stop: Ints
    """[n, d] index after the last of each row's box along each dim."""
    offset: Ints
    """[n] where each row's box begins in its buffer."""
    strides: Ints
    """[n, d] strides of each row's box in its buffer."""
    buffer: Ints
    """[n] index into `Tensor.buffers` of each row's buffer."""
    sizes: tuple[tuple[int, int, int], ...]
    """(slot, buffer, elements) of every slot's buffers, padding included."""

    @cached_property
    def key(self) -> bytes:
        """Digest of the content: equal holdings have equal keys on every machine."""
        digest = blake2b(repr((self.shape, self.sizes)).encode(), digest_size=16)
        for array in (self.slots, self.start, self.stop, self.offset, self.strides, self.buffer):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return digest.digest()

    @cached_property
    def geometry(self) -> bytes:
        """Digest of which slots hold which boxes: all that a plan depends on."""
        digest = blake2b(repr(self.shape).encode(), digest_size=16)
        for array in (self.slots, self.start, self.stop):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return digest.digest()

    def rows(self, slot: int) -> range:
        low, high = np.searchsorted(self.slots, [slot, slot + 1])
        return range(int(low), int(high))

    def view(self, slot: int, box: Box) -> View:
        """View of the box in `slot`'s memory. Raises `LookupError` when no single row of the slot covers it."""
        for start, stop, offset, strides, buffer in self.rows_of(slot):
            if all(a <= x and y <= b for a, x, y, b in zip(start, *box, stop, strict=True)):
                at = offset + sum((x - a) * stride for a, x, stride in zip(start, box[0], strides, strict=True))
                return View(buffer, at, tuple(y - x for x, y in zip(*box, strict=True)), strides)
        raise LookupError(f"slot {slot} does not hold {box} of a tensor of shape {self.shape}")

    @cached_property
    def _by_slot(self) -> dict[int, list[tuple[Shape, Shape, int, Shape, int]]]:
        return {}

    def rows_of(self, slot: int) -> list[tuple[Shape, Shape, int, Shape, int]]:
        """(start, stop, offset, strides, buffer) of every row as plain numbers, made when a slot is first asked for."""
        if slot not in self._by_slot:
            rows = self.rows(slot)
            part = slice(rows.start, rows.stop)
            columns = (self.start[part], self.stop[part], self.offset[part], self.strides[part], self.buffer[part])
            start, stop, offset, strides, buffer = (column.tolist() for column in columns)
            self._by_slot[slot] = [
                (tuple(a), tuple(b), o, tuple(s), k)
                for a, b, o, s, k in zip(start, stop, offset, strides, buffer, strict=True)
            ]
        return self._by_slot[slot]


def row_major(shape: Sequence[int]) -> Shape:
    """Strides of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def volume(box: Box) -> int:
    return prod(stop - start for start, stop in zip(*box, strict=True))


def interval_boxes(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """Elements `low` to `high` of a tensor in row-major order, as at most 2d - 1 boxes in that order.

    Of a 4 x 6 tensor, elements 4 to 15 are the end of row 0, row 1, and the beginning of row 2.
    """
    if low >= high:
        return
    if len(shape) == 1:
        yield (low,), (high,)
        return
    inner = prod(shape[1:])
    (first, skipped), (last, rest) = divmod(low, inner), divmod(high, inner)
    if first == last:
        for start, stop in interval_boxes(shape[1:], skipped, rest):
            yield (first, *start), (first + 1, *stop)
        return
    if skipped:
        for start, stop in interval_boxes(shape[1:], skipped, inner):
            yield (first, *start), (first + 1, *stop)
        first += 1
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last, *shape[1:])
    for start, stop in interval_boxes(shape[1:], 0, rest):
        yield (last, *start), (last + 1, *stop)
