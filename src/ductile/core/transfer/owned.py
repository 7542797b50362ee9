"""Matrices that are each whole on one slot, for what cannot be computed on a part of one: `owned_layout`.

    stored   rows 0:4 on slot 0, rows 4:8 on slot 1, of both matrices
    owned    the first on slot 0, the second on slot 1

A plan from one to the other (`ductile.core.transfer.planning`) works whatever cut the stored ones.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from ductile.core.layout.geometry.holdings import Holdings, Ints, Shape, row_major
from ductile.core.layout.geometry.layout import Layout, Tensor


def owned_layout(stored: Layout, costs: Mapping[str, int]) -> Layout:
    """Return the layout in which each of the stored tensors is whole on one of their slots, so that all slots have
    about equal costs: the dearest first, each to the slot with least so far."""
    loads = dict.fromkeys(stored.slots, 0)
    owners: dict[str, int] = {}
    for name in sorted(stored.tensors, key=lambda name: (-costs[name], name)):
        owners[name] = min(loads, key=lambda slot: (loads[slot], slot))
        loads[owners[name]] += costs[name]
    return Layout(
        (Tensor(each.name, each.dtype, _whole(each.shape, owners[each.name])) for each in stored), stored.slots
    )


def batches_of(num_bytes: Mapping[str, int], most_bytes: int) -> list[list[str]]:
    """Return the names in order, cut into batches of at most so many bytes, but for a tensor that has more."""
    batches: list[list[str]] = []
    room = 0
    for name, size in num_bytes.items():
        if not batches or size > room:
            batches.append([])
            room = most_bytes
        batches[-1].append(name)
        room -= size
    return batches


def _whole(shape: Shape, slot: int) -> Holdings:
    row: Sequence[Shape] = [(0,) * len(shape), shape, row_major(shape)]
    start, stop, strides = (np.array([each], dtype=np.int64) for each in row)
    zero: Ints = np.zeros(1, dtype=np.int64)
    return Holdings(
        shape, np.array([slot], dtype=np.int64), start, stop, zero, strides, zero, ((slot, 0, prod(shape)),)
    )
