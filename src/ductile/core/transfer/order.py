"""Chooses the order in which slots train, so that most of the state stays where it is.

before = ParallelLayout.of((0, 1))
stays_put(before, before.on((0, 1, 2)))    # slots 0, 2, 1: a third of the state moves; 0, 1, 2 would move half of it
"""

from math import lcm

from ductile.core.layout.geometry.layout import Layout, Tensor
from ductile.core.layout.geometry.parallel_layout import FULLY_SHARDED, ParallelLayout
from ductile.core.layout.geometry.sharding import Shard, place
from ductile.core.transfer.assignment import arrange

CUTS = (("pp",), ("tp",), FULLY_SHARDED)
"""Axes that cut the state, each product of them along a dim of its own."""


def stays_put(before: ParallelLayout, after: ParallelLayout) -> ParallelLayout:
    """`after` with its slots in the order that keeps most bytes in place, coming from `before`.

    Rows are dealt out in chunks, and every tensor has many of them, so one tensor of as many rows as both layouts can
    share stands for all; stages and slots of tensor parallelism likewise.
    """
    shape = tuple(lcm(before.mesh.size(axes), after.mesh.size(axes)) for axes in CUTS)
    after = after.on(sorted(after.slots))
    chosen = arrange(_stand_in(before, shape), _stand_in(after, shape))
    return after.on(chosen[slot] for slot in after.slots)


def _stand_in(layout: ParallelLayout, shape: tuple[int, ...]) -> Layout:
    steps = [Shard(axes, dim) for dim, axes in enumerate(CUTS)]
    return Layout([Tensor("state", "uint8", place(shape, layout.mesh, steps))], layout.slots)
