"""What a rank holds of a tensor that mesh axes cut by placements, as DTensor and FSDP2 do it.

    Shard(dim)                           chunks of ceil(n / size), like `torch.chunk`; the last ones short or empty
    _StridedShard(dim, split_factor=f)   f strips first, then chunks of each strip: a rank has its chunk of every strip

FSDP2 on tensor parallelism cuts along tp first and along its own axis after that, and writes it down the other way
round: `[_StridedShard(0, split_factor=tp), Shard(0)]`. With sizes that do not divide, splitting a tensor in the written
order gives other rows. Rows lie as FSDP2 makes them, or the tensor is refused: where the two orders differ, at least
one rank sees it in its local shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ductile.core.layout.geometry.holdings import Shape
from ductile.core.layout.geometry.sharding import IndexRun, chunk


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh axis, and what this rank has of what it cuts."""

    dim: int
    size: int
    coordinate: int
    strips: int = 1
    """DTensor's `split_factor`: strips of the dim, each of which is cut into chunks."""


def held_runs(shape: Shape, cuts: Sequence[Cut], local_shape: Shape) -> list[list[IndexRun]]:
    """The runs of each dim that a rank holds, cuts given from the first mesh axis to the last.

    Raises `ValueError` when the local tensor has another shape than the cuts leave.
    """
    made = _as_made(cuts)
    extents, runs = _apply(shape, cuts if made is None else made)
    if extents == local_shape or not prod(extents) + prod(local_shape):
        return runs
    text = f"its local tensor has shape {list(local_shape)}; its placements leave {list(extents)} here"
    if made is not None and any(cut.strips > 1 for cut in cuts):
        text += " when they are cut as FSDP2 does it. Redistribute it to plain shards first"
    raise ValueError(text)


def _as_made(cuts: Sequence[Cut]) -> list[Cut] | None:
    """The order in which plain chunks give the same: a strided cut comes after the cuts that made its strips."""
    order: list[Cut] = []
    for cut in reversed(cuts):
        strips = place = 0
        for place in range(len(order) + 1):
            strips = prod(other.size for other in order[:place] if other.dim == cut.dim)
            if strips == cut.strips:
                break
        if strips != cut.strips:
            return None
        order.insert(place, Cut(cut.dim, cut.size, cut.coordinate))
    return order


def _apply(shape: Shape, cuts: Sequence[Cut]) -> tuple[Shape, list[list[IndexRun]]]:
    extents = list(shape)
    dims: list[list[IndexRun]] = [[(0, 0, length)] if length else [] for length in shape]
    for cut in cuts:
        extents[cut.dim], dims[cut.dim] = _strips(extents[cut.dim], dims[cut.dim], cut)
    return tuple(extents), [_joined(runs) for runs in dims]


def _strips(extent: int, runs: list[IndexRun], cut: Cut) -> tuple[int, list[IndexRun]]:
    kept: list[IndexRun] = []
    length = 0
    for strip in range(cut.strips):
        part, inside = chunk(*chunk(extent, runs, cut.strips, strip), cut.size, cut.coordinate)
        kept += [(position, length + local, count) for position, local, count in inside]
        length += part
    return length, kept


def _joined(runs: list[IndexRun]) -> list[IndexRun]:
    """Runs that follow each other on both sides become one."""
    joined: list[IndexRun] = []
    for position, local, length in runs:
        if joined and (position, local) == (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]):
            joined[-1] = (*joined[-1][:2], joined[-1][2] + length)
        else:
            joined.append((position, local, length))
    return joined
