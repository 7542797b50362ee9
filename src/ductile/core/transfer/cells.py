"""The common refinement of two layouts: blocks that every slot holds, and needs, as a whole or not at all.

1. A tensor's source boxes become disjoint atoms, each with the slots that hold it; its target boxes likewise.
2. Where a source atom and a target atom meet lies a cell.
3. Cells of all tensors with the same (holders, needers) are put end to end: a line. Only lines are planned.

Tensors whose two geometries are equal form a class, and a class is refined once, however many layers it has.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from ductile.core.layout.geometry.holdings import Box, Holdings, Ints, Shape, interval_boxes, volume
from ductile.core.layout.geometry.layout import Layout, Tensor

Slots = tuple[int, ...]
REMEMBERED_CLASSES = 20_000
"""Most classes whose cells are remembered. A flat buffer makes a class of every tensor; a run that resizes for weeks
must not remember them all."""


class NotReshardable(ValueError):
    """The target needs what the source does not have. The text names the tensor and the first missing block."""


@dataclass(frozen=True, eq=False)
class Atoms:
    """Disjoint boxes of one tensor, each with the slots that have it: a boxes, d dims."""

    start: Ints
    """[a, d] first index of each box along each dim."""
    stop: Ints
    """[a, d] index after the last of each box along each dim."""
    slots: list[Slots]


@dataclass(frozen=True, eq=False)
class Cells:
    """c cells of one class; cell i is held by `holders[i]` and needed by `needers[i]`."""

    boxes: list[Box]
    holders: list[Slots]
    needers: list[Slots]


@dataclass(frozen=True, slots=True)
class Entry:
    """One cell of every tensor of a class, tensor after tensor, each in row-major order."""

    names: tuple[str, ...]
    box: Box
    item_bytes: int
    offset: int
    """Offset at which the entry begins on its line, in bytes."""

    @property
    def num_bytes(self) -> int:
        return len(self.names) * volume(self.box) * self.item_bytes

    def parts(self, low: int, high: int) -> list[tuple[str, Box]]:
        """The entry's bytes low:high as boxes of tensors, in order. Both are multiples of `item_bytes`."""
        start, stop = self.box
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        each = volume(self.box) * self.item_bytes
        found: list[tuple[str, Box]] = []
        for index in range(low // each, -(-high // each)):
            first = max(low - index * each, 0) // self.item_bytes
            last = min(high - index * each, each) // self.item_bytes
            for begin, end in interval_boxes(shape, first, last):
                box = (
                    tuple(a + x for a, x in zip(start, begin, strict=True)),
                    tuple(a + x for a, x in zip(start, end, strict=True)),
                )
                found.append((self.names[index], box))
        return found


@dataclass(frozen=True, eq=False)
class Line:
    """All bytes that the same slots hold and the same other slots need. Wider items come first, so that every multiple
    of eight bytes is a border between items."""

    holders: Slots
    needers: Slots
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        return self.entries[-1].offset + self.entries[-1].num_bytes

    def parts(self, low: int, high: int) -> list[tuple[str, Box]]:
        """The line's bytes low:high as boxes of tensors, in order."""
        found: list[tuple[str, Box]] = []
        first = bisect_right(self.entries, low, key=lambda entry: entry.offset) - 1
        for entry in self.entries[first:]:
            if entry.offset >= high:
                break
            begin, end = max(low - entry.offset, 0), min(high - entry.offset, entry.num_bytes)
            if begin < end:
                found += entry.parts(begin, end)
        return found


@dataclass(frozen=True, eq=False)
class Refinement:
    lines: list[Line]
    """Lines whose needers have to receive them, ordered by (holders, needers)."""
    local: list[Line]
    """Lines whose holders are their needers: bytes that these slots keep."""
    num_classes: int


class Refiner:
    """Remembers atoms and cells by the content of the geometry, so that a class is refined once in a run."""

    def __init__(self) -> None:
        self._atoms: dict[bytes, Atoms] = {}
        self._cells: dict[tuple[bytes, bytes], Cells] = {}

    def refine(self, source: Layout, target: Layout) -> Refinement:
        """The lines of a move from one layout to another. Raises `NotReshardable`."""
        classes = _classes(source, target)
        lines: dict[tuple[Slots, Slots], list[tuple[int, Box, tuple[str, ...]]]] = {}
        local: dict[tuple[Slots, Slots], list[tuple[int, Box, tuple[str, ...]]]] = {}
        for (_, _, item_bytes), tensors in classes.items():
            cells = self._cells_of(source[tensors[0].name], tensors[0])
            names = tuple(tensor.name for tensor in tensors)
            split: dict[tuple[int, int], tuple[Slots, Slots]] = {}
            for box, holders, needers in zip(cells.boxes, cells.holders, cells.needers, strict=True):
                pair = id(holders), id(needers)
                if pair not in split:
                    have = set(holders)
                    split[pair] = (
                        tuple(slot for slot in needers if slot not in have),
                        tuple(slot for slot in needers if slot in have),
                    )
                remote, kept = split[pair]
                if remote:
                    lines.setdefault((holders, remote), []).append((item_bytes, box, names))
                if kept:
                    local.setdefault((kept, kept), []).append((item_bytes, box, names))
        return Refinement(_lines(lines), _lines(local), len(classes))

    def common(self, source: Layout, target: Layout) -> list[tuple[Slots, Slots, int]]:
        """(holders, needers, bytes) of all cells together, before anything is decided."""
        found: dict[tuple[Slots, Slots], int] = {}
        for (_, _, item_bytes), tensors in _classes(source, target).items():
            cells = self._cells_of(source[tensors[0].name], tensors[0])
            for box, holders, needers in zip(cells.boxes, cells.holders, cells.needers, strict=True):
                found[holders, needers] = found.get((holders, needers), 0) + volume(box) * item_bytes * len(tensors)
        return [(holders, needers, num_bytes) for (holders, needers), num_bytes in found.items()]

    def _cells_of(self, source: Tensor, target: Tensor) -> Cells:
        key = source.holdings.geometry, target.holdings.geometry
        if key not in self._cells:
            if len(self._cells) >= REMEMBERED_CLASSES:
                self._cells.clear()
                self._atoms.clear()
            held, needed = self._atoms_of(source.holdings), self._atoms_of(target.holdings)
            self._cells[key] = _meet(held, needed, target.name)
        return self._cells[key]

    def _atoms_of(self, holdings: Holdings) -> Atoms:
        if holdings.geometry not in self._atoms:
            self._atoms[holdings.geometry] = atoms(holdings)
        return self._atoms[holdings.geometry]


def _classes(source: Layout, target: Layout) -> dict[tuple[bytes, bytes, int], list[Tensor]]:
    """The target's tensors by (geometry in the source, geometry in the target, bytes an item)."""
    classes: dict[tuple[bytes, bytes, int], list[Tensor]] = {}
    for tensor in target:
        held = source.tensors.get(tensor.name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            have = "nothing" if held is None else f"{held.dtype} {list(held.shape)}"
            raise NotReshardable(
                f"{tensor.name}: the target needs {tensor.dtype} {list(tensor.shape)}, the source has {have}"
            )
        key = (held.holdings.geometry, tensor.holdings.geometry, tensor.item_bytes)
        classes.setdefault(key, []).append(tensor)
    return classes


def _lines(found: dict[tuple[Slots, Slots], list[tuple[int, Box, tuple[str, ...]]]]) -> list[Line]:
    lines: list[Line] = []
    for (holders, needers), cells in sorted(found.items(), key=lambda item: item[0]):
        cells.sort(key=lambda cell: -cell[0])
        entries: list[Entry] = []
        offset = 0
        for item_bytes, box, names in cells:
            entries.append(Entry(names, box, item_bytes, offset))
            offset += entries[-1].num_bytes
        lines.append(Line(holders, needers, tuple(entries)))
    return lines


def atoms(holdings: Holdings) -> Atoms:
    """The disjoint boxes of a tensor. In almost every layout two slots hold the same box or none in common; where boxes
    overlap in part, they are cut along all their borders."""
    dims = len(holdings.shape)
    table = np.concatenate([holdings.start, holdings.stop], axis=1)
    unique, numbers = np.unique(table, axis=0, return_inverse=True)
    inverse: Ints = numbers.reshape(-1).astype(np.int64)
    order = np.argsort(inverse, kind="stable")
    borders: list[int] = np.searchsorted(inverse[order], np.arange(len(unique) + 1)).tolist()
    owners: list[int] = holdings.slots[order].tolist()
    slots: list[Slots] = [tuple(dict.fromkeys(owners[a:b])) for a, b in pairwise(borders)]
    start, stop = unique[:, :dims], unique[:, dims:]
    first, second = meeting_pairs(start, stop, start, stop)
    mixed: list[int] = np.unique(first[first != second]).tolist()
    if not mixed:
        return Atoms(start, stop, slots)
    alone = sorted(set(range(len(unique))) - set(mixed))
    pieces = _cut(start[mixed], stop[mixed], [slots[index] for index in mixed])
    return Atoms(
        np.concatenate([start[alone], pieces.start]),
        np.concatenate([stop[alone], pieces.stop]),
        [slots[index] for index in alone] + pieces.slots,
    )


def _cut(start: Ints, stop: Ints, slots: Sequence[Slots]) -> Atoms:
    """Cut overlapping boxes along the borders of all of them."""
    dims = range(start.shape[1])
    borders: list[Ints] = [np.unique(np.concatenate([start[:, dim], stop[:, dim]])) for dim in dims]
    first: list[list[int]] = [np.searchsorted(borders[dim], start[:, dim]).tolist() for dim in dims]
    last: list[list[int]] = [np.searchsorted(borders[dim], stop[:, dim]).tolist() for dim in dims]
    having: dict[Shape, set[int]] = {}
    for index, owners in enumerate(slots):
        for place in product(*(range(first[dim][index], last[dim][index]) for dim in dims)):
            having.setdefault(place, set()).update(owners)
    places = sorted(having)
    return Atoms(
        np.array([[int(border[i]) for border, i in zip(borders, place, strict=True)] for place in places], np.int64),
        np.array(
            [[int(border[i + 1]) for border, i in zip(borders, place, strict=True)] for place in places], np.int64
        ),
        [tuple(sorted(having[place])) for place in places],
    )


def _meet(held: Atoms, needed: Atoms, name: str) -> Cells:
    source, target = meeting_pairs(held.start, held.stop, needed.start, needed.stop)
    start = np.maximum(held.start[source], needed.start[target])
    stop = np.minimum(held.stop[source], needed.stop[target])
    found = np.zeros(len(needed.slots), dtype=np.int64)
    np.add.at(found, target, np.prod(stop - start, axis=1))
    missing = np.flatnonzero(found < np.prod(needed.stop - needed.start, axis=1))
    if len(missing):
        index = int(missing[0])
        raise NotReshardable(
            f"{name}: slots {needed.slots[index]} need the block from {needed.start[index].tolist()} to "
            f"{needed.stop[index].tolist()}, and the slots of the source do not hold all of it"
        )
    order = np.lexsort([*start.T[::-1]])
    boxes = [(tuple(a), tuple(b)) for a, b in zip(start[order].tolist(), stop[order].tolist(), strict=True)]
    return Cells(
        boxes,
        [held.slots[index] for index in source[order].tolist()],
        [needed.slots[index] for index in target[order].tolist()],
    )


def meeting_pairs(start: Ints, stop: Ints, other_start: Ints, other_stop: Ints) -> tuple[Ints, Ints]:
    """Indices (i, j) of all boxes i and other boxes j that have an element in common.

    A sweep along the dim that leaves the fewest candidates: a thousand chunks need not look at a thousand others each.
    """
    best: tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]] | None = None
    fewest = 0
    for dim in range(start.shape[1]):
        order = np.argsort(start[:, dim], kind="stable")
        reached = np.maximum.accumulate(stop[order, dim])
        low = np.searchsorted(reached, other_start[:, dim], side="right")
        count = np.maximum(np.searchsorted(start[order, dim], other_stop[:, dim], side="left") - low, 0)
        if best is None or int(count.sum()) < fewest:
            best, fewest = (order, low, count), int(count.sum())
    assert best is not None, "a tensor has at least one dim"
    order, low, count = best
    second = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(second)) - np.repeat(np.cumsum(count) - count, count)
    first = order[np.repeat(low, count) + within]
    meet = np.all(np.maximum(start[first], other_start[second]) < np.minimum(stop[first], other_stop[second]), axis=1)
    return first[meet].astype(np.int64), second[meet].astype(np.int64)
