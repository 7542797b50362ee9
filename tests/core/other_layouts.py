"""Layouts that the trainer does not have, for the planner, which takes them like any others.

- ZeRO-1 style state: many tensors end to end in one buffer, which an axis cuts into equal ranges. What lies in a range
  are intervals of flattened (tensor-parallel) locals, so a slot's part of a matrix is up to three boxes: the end of a
  row, whole rows, the beginning of a row.
- Experts as a list of tensors, each in a buffer of its own.
- A layout in the hands of other slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm

import numpy as np

from ductile.core.layout.geometry.holdings import Holdings, Shape, interval_boxes
from ductile.core.layout.geometry.layout import Layout, Tensor
from ductile.core.layout.geometry.mesh import Mesh

Row = tuple[int, Shape, Shape, int, Shape]
"""(slot, start, stop, offset, strides) of a box: where it lies in the tensor, and where in the slot's buffer."""


def flatten(
    tensors: Sequence[Tensor], mesh: Mesh, axes: tuple[str, ...], buffer: str, align: int = 64, multiple: int = 128
) -> list[Tensor]:
    """The same tensors as ranges of one buffer, laid in the given order.

    Every tensor must be replicated along `axes`. It starts at a multiple of `align` elements, and each range is as long
    as the others; the total is a multiple of `multiple`. What is between and behind the tensors is padding.
    """
    rows: list[list[Row]] = [[] for _ in tensors]
    sizes: list[list[tuple[int, int, int]]] = [[] for _ in tensors]
    for group in mesh.groups(axes):
        lengths = [{slot: size for slot, _, size in tensor.holdings.sizes}.get(group[0], 0) for tensor in tensors]
        starts: list[int] = []
        end = 0
        for length in lengths:
            starts.append(-(-end // align) * align)
            end = starts[-1] + length
        unit = lcm(multiple, len(group))
        share = -(-end // unit) * unit // len(group)
        for index, tensor in enumerate(tensors):
            if not lengths[index]:
                continue
            _check_replicated(tensor, group)
            first = starts[index]
            for place in range(first // share, -(-(first + lengths[index]) // share)):
                low, high = max(first, place * share), min(first + lengths[index], (place + 1) * share)
                interval = (low - first, high - first, first - place * share)
                rows[index] += _interval_rows(tensor.holdings, group[0], group[place], lengths[index], interval)
                sizes[index].append((group[place], 0, share))
    return [
        Tensor(tensor.name, tensor.dtype, _holdings(tensor.shape, rows[index], sizes[index]), (buffer,))
        for index, tensor in enumerate(tensors)
    ]


def zero_layout(params: Layout, mesh: Mesh) -> Layout:
    """The parameters end to end in one flat buffer a stage and tp slot, in reverse order, cut into ranges along
    dp_replicate: where a ZeRO-1 optimizer keeps its masters and moments."""
    flat = {tensor.name: tensor for tensor in flatten(list(params)[::-1], mesh, ("dp_replicate",), "zero")}
    return Layout([flat[tensor.name] for tensor in params], mesh.slots)


def unstacked(holdings: Holdings) -> Holdings:
    """The same boxes with every index of dim 0 in a buffer of its own: experts as a list of tensors."""
    count = holdings.stop[:, 0] - holdings.start[:, 0]
    row = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    start, stop = holdings.start[row], holdings.stop[row]
    start[:, 0] += within
    stop[:, 0] = start[:, 0] + 1
    experts = zip(holdings.slots[row].tolist(), start[:, 0].tolist(), holdings.strides[row, 0].tolist(), strict=True)
    return Holdings(
        holdings.shape,
        holdings.slots[row],
        start,
        stop,
        holdings.offset[row] % holdings.strides[row, 0],
        holdings.strides[row],
        start[:, 0].copy(),
        tuple(sorted(set(experts))),
    )


def relabelled(layout: Layout, slots: Mapping[int, int]) -> Layout:
    """The same layout with other slots in the places of these. `slots` maps every slot to another one."""
    if len(set(slots.values())) != len(slots):
        raise ValueError(f"{dict(slots)} gives two places to one slot")
    moved: dict[int, Holdings] = {}
    for tensor in layout:
        if id(tensor.holdings) not in moved:
            moved[id(tensor.holdings)] = _in_other_hands(tensor.holdings, slots)
    tensors = [replace(tensor, holdings=moved[id(tensor.holdings)]) for tensor in layout]
    return Layout(tensors, [slots[slot] for slot in layout.slots])


def _in_other_hands(holdings: Holdings, slots: Mapping[int, int]) -> Holdings:
    renamed = np.array([slots[slot] for slot in holdings.slots.tolist()], dtype=np.int64)
    order = np.argsort(renamed, kind="stable")
    return Holdings(
        holdings.shape,
        renamed[order],
        holdings.start[order],
        holdings.stop[order],
        holdings.offset[order],
        holdings.strides[order],
        holdings.buffer[order],
        tuple(sorted((slots[slot], buffer, size) for slot, buffer, size in holdings.sizes)),
    )


def _interval_rows(
    holdings: Holdings, representative: int, slot: int, length: int, interval: tuple[int, int, int]
) -> list[Row]:
    """Elements low:high of the representative's local tensor, lying `shift` further in `slot`'s range."""
    low, high, shift = interval
    found: list[Row] = []
    for row in holdings.rows(representative):
        start, stop = holdings.start[row].tolist(), holdings.stop[row].tolist()
        strides: list[int] = holdings.strides[row].tolist()
        extents = tuple(whole // part for whole, part in zip([length, *strides[:-1]], strides, strict=True))
        local: list[int] = []
        rest = int(holdings.offset[row])
        for stride in strides:
            local.append(rest // stride)
            rest %= stride
        for begin, end in interval_boxes(extents, low, high):
            lower = [max(b, at) for b, at in zip(begin, local, strict=True)]
            upper = [min(e, at + y - x) for e, at, x, y in zip(end, local, start, stop, strict=True)]
            if all(a < b for a, b in zip(lower, upper, strict=True)):
                moved = [x - at for x, at in zip(start, local, strict=True)]
                offset = sum(a * stride for a, stride in zip(lower, strides, strict=True)) + shift
                box = (
                    tuple(a + m for a, m in zip(lower, moved, strict=True)),
                    tuple(b + m for b, m in zip(upper, moved, strict=True)),
                )
                found.append((slot, *box, offset, tuple(strides)))
    return found


def _holdings(shape: Shape, rows: list[Row], sizes: list[tuple[int, int, int]]) -> Holdings:
    rows = sorted(rows, key=lambda row: row[0])
    dims = len(shape)
    return Holdings(
        shape,
        np.array([row[0] for row in rows], dtype=np.int64),
        np.array([row[1] for row in rows], dtype=np.int64).reshape(len(rows), dims),
        np.array([row[2] for row in rows], dtype=np.int64).reshape(len(rows), dims),
        np.array([row[3] for row in rows], dtype=np.int64),
        np.array([row[4] for row in rows], dtype=np.int64).reshape(len(rows), dims),
        np.zeros(len(rows), dtype=np.int64),
        tuple(sorted(set(sizes))),
    )


def _check_replicated(tensor: Tensor, group: tuple[int, ...]) -> None:
    holdings = tensor.holdings
    first, last = holdings.rows(group[0]), holdings.rows(group[-1])
    ours, theirs = slice(first.start, first.stop), slice(last.start, last.stop)
    same = np.array_equal(holdings.start[ours], holdings.start[theirs])
    if not same or not np.array_equal(holdings.stop[ours], holdings.stop[theirs]):
        raise ValueError(
            f"{tensor.name}: slots {group[0]} and {group[-1]} hold different parts; it cannot be flattened"
        )
