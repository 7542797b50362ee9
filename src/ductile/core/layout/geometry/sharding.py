"""How a tensor is cut over a mesh: a list of `Shard` steps, each along one mesh axis and one dim.

    column parallel            Shard("tp", 0)
    row parallel               Shard("tp", 1)
    fused gate and up          Shard("tp", 0, parts=((inner, inner), (inner, inner)))
    FSDP2 on top of the latter  ... followed by Shard("dp_shard", 0): chunks of what tp has left, in its local order
    experts                    Shard("ep", 0) of [experts, ...]

A step without parts cuts like `torch.chunk`: chunks of ceil(n / size), the last ones shorter or empty. Axes that no
step names hold replicas. A dim is therefore a list of runs, global and local, and a slot's boxes are the products of
its dims' runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from ductile.core.layout.geometry.holdings import Holdings, Shape, row_major
from ductile.core.layout.geometry.mesh import Mesh

IndexRun = tuple[int, int, int]
"""(global start, local start, length) of indices of a dim that follow each other both in the tensor and in a slot's
part."""


@dataclass(frozen=True)
class Shard:
    """Cut one dim along one axis, or along several taken together (the first one outermost)."""

    axis: str | tuple[str, ...]
    dim: int = 0
    parts: tuple[tuple[int, int], ...] = ()
    """Components of a fused dim: (length, number of units), each cut for itself. A unit (a head) stays whole.

    The component with the most units leads; the others follow, so that a slot has the key heads that its query heads
    need: with fewer key heads than slots, neighbours hold the same one. One of length 0 may lead, and has no rows.
    """
    padded: int = 0
    """Length to which the dim is padded before it is cut; 0 for no padding. The extra rows exist in memory and are not
    data."""

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,) if isinstance(self.axis, str) else self.axis


def place(
    shape: Shape, mesh: Mesh, shards: Sequence[Shard] = (), only: tuple[tuple[str, tuple[int, ...]], ...] = ()
) -> Holdings:
    """What every slot of `mesh` holds of a tensor that `shards` cut in this order, each slot in one contiguous buffer.

    `only` names the coordinates that hold it at all: `(("pp", (0, 3)),)` is the first and the last of four stages.
    Raises `ValueError` on steps that do not fit the shape.
    """
    if prod(shape) < 1 or not shape:
        raise ValueError(f"shape {shape}: every dim must be at least 1; a scalar is a tensor of shape (1,)")
    for shard in shards:
        _check(shape, shard)
    alike: dict[tuple[int, ...], list[int]] = {}
    for slot in mesh.slots:
        if all(mesh.coordinate(slot, (axis,)) in kept for axis, kept in only):
            alike.setdefault(tuple(mesh.coordinate(slot, shard.axes) for shard in shards), []).append(slot)
    slots: list[int] = []
    sizes: list[tuple[int, int, int]] = []
    rows: list[list[tuple[int, ...]]] = []
    for coordinates, group in alike.items():
        extents, dims = _runs(shape, mesh, shards, coordinates)
        strides = row_major(extents)
        boxes = [_row(runs, strides) for runs in product(*dims)]
        for slot in group:
            sizes.append((slot, 0, prod(extents)))
            slots += [slot] * len(boxes)
            rows.append(boxes)
    table = np.array([row for boxes in rows for row in boxes], dtype=np.int64).reshape(len(slots), 3 * len(shape) + 1)
    owners = np.array(slots, dtype=np.int64)
    order = np.argsort(owners, kind="stable")
    start, stop, strides, offset = np.split(table[order], [len(shape), 2 * len(shape), 3 * len(shape)], axis=1)
    buffer = np.zeros(len(slots), dtype=np.int64)
    return Holdings(shape, owners[order], start, stop, offset[:, 0], strides, buffer, tuple(sorted(sizes)))


def local_shape(shape: Shape, mesh: Mesh, shards: Sequence[Shard], slot: int) -> Shape:
    """Shape of a slot's part of a tensor that `shards` cut in this order, padding included."""
    return _runs(shape, mesh, shards, tuple(mesh.coordinate(slot, shard.axes) for shard in shards))[0]


def _row(runs: tuple[IndexRun, ...], strides: Shape) -> tuple[int, ...]:
    """start, stop and strides of every dim, then the offset."""
    start = tuple(position for position, _, _ in runs)
    stop = tuple(position + length for position, _, length in runs)
    return (*start, *stop, *strides, sum(run[1] * stride for run, stride in zip(runs, strides, strict=True)))


def _runs(
    shape: Shape, mesh: Mesh, shards: Sequence[Shard], coordinates: tuple[int, ...]
) -> tuple[Shape, list[Sequence[IndexRun]]]:
    """A slot's local shape, and the runs of each dim that are data."""
    extents = list(shape)
    dims: list[Sequence[IndexRun]] = [[(0, 0, length)] for length in shape]
    for shard, coordinate in zip(shards, coordinates, strict=True):
        size, dim = mesh.size(shard.axes), shard.dim
        if shard.parts:
            extents[dim], dims[dim] = _split(shard.parts, size, coordinate)
        else:
            extents[dim], dims[dim] = chunk(shard.padded or extents[dim], dims[dim], size, coordinate)
    return tuple(extents), dims


@lru_cache(maxsize=1024)  # slots that differ along other axes only have the same
def _split(parts: tuple[tuple[int, int], ...], size: int, coordinate: int) -> tuple[int, Sequence[IndexRun]]:
    runs: list[IndexRun] = []
    base = local = 0
    held = units_of([units for _, units in parts], size, coordinate)
    for (length, units), kept in zip(parts, held, strict=True):
        if kept and length:
            unit = length // units
            runs.append((base + kept.start * unit, local, len(kept) * unit))
            local += len(kept) * unit
        base += length
    return local, tuple(runs)


def units_of(units: Sequence[int], size: int, coordinate: int) -> list[range]:
    """Units of each component of a fused dim that chunk number `coordinate` of `size` has."""
    lead = max(units)
    length = -(-lead // size)
    low, high = min(coordinate * length, lead), min((coordinate + 1) * length, lead)
    return [range(low * count // lead, -(-high * count // lead)) if low < high else range(0) for count in units]


def chunk(extent: int, runs: Sequence[IndexRun], size: int, coordinate: int) -> tuple[int, list[IndexRun]]:
    """Chunk number `coordinate` of `size`, cut like `torch.chunk`: its length, and what it has of the runs."""
    length = -(-extent // size)
    low, high = min(coordinate * length, extent), min((coordinate + 1) * length, extent)
    kept: list[IndexRun] = []
    for position, local, count in runs:
        start, stop = max(low, local), min(high, local + count)
        if start < stop:
            kept.append((position + start - local, start - low, stop - start))
    return high - low, kept


def _check(shape: Shape, shard: Shard) -> None:
    if not 0 <= shard.dim < len(shape):
        raise ValueError(f"{shard} cuts dim {shard.dim} of a tensor of shape {shape}")
    length = shape[shard.dim]
    if shard.parts and sum(part for part, _ in shard.parts) != length:
        raise ValueError(f"{shard}: the parts do not add up to dim {shard.dim} of shape {shape}")
    if any(units < 1 or part % units for part, units in shard.parts):
        raise ValueError(f"{shard}: a part is not a whole number of equal units")
    lead = max((units for _, units in shard.parts), default=1)
    if any(lead % units for _, units in shard.parts):
        raise ValueError(f"{shard}: {lead} units cannot follow those of every other part evenly")
    if shard.padded and (shard.padded < length or shard.parts):
        raise ValueError(f"{shard}: padding makes a dim longer, never shorter, and does not go with parts")
