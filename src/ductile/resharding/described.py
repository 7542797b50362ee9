"""A layout put together from what its slots say of themselves.

The mesh, the parallelism and the framework behind it need not be known: every slot lists the blocks that it holds, and
all lists together are the layout. A list has plain values only, so that it travels as msgpack.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ductile.core.layout.geometry.holdings import Holdings, Shape
from ductile.core.layout.geometry.layout import Layout, Tensor


class Disagreement(ValueError):
    """Two slots describe one tensor differently, or one slot has a block twice. The text has both sides."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor in a buffer of its own: from `start` to `start + extent`, with these strides, in elements."""

    start: Shape
    extent: Shape
    strides: Shape

    @property
    def size(self) -> int:
        """Elements from the first one to the last, whatever lies between."""
        return 1 + sum((count - 1) * stride for count, stride in zip(self.extent, self.strides, strict=True))

    def overlaps(self, other: "Piece") -> bool:
        both = zip(self.start, self.extent, other.start, other.extent, strict=True)
        return all(max(a, b) < min(a + m, b + n) for a, m, b, n in both)


@dataclass(frozen=True, slots=True)
class Held:
    """What one slot has of all tensors that lie alike on it."""

    names: tuple[str, ...]
    dtype: str
    shape: Shape
    """Shape of the whole tensor; () for a scalar."""
    pieces: tuple[Piece, ...]
    """Blocks that the slot holds; piece k lies in the buffer `buffer_name(name, k)`. Empty: the slot only says that
    there is such a tensor."""
    padded: bool = False
    """Whether the whole tensor may be longer in the source or in the target than in the other: what both have is data,
    the rest is padding."""


def buffer_name(name: str, piece: int) -> str:
    return f"{name}#{piece}" if piece else name


def assemble(described: Mapping[int, Sequence[Held]], side: str) -> Layout:
    """The layout of which each slot has described its own part. `side` names it in errors.

    Raises `Disagreement`.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for slot in sorted(described):
        for index, held in enumerate(described[slot]):
            _check_apart(slot, held, side)
            for name in held.names:
                found.setdefault(name, []).append((slot, index))
    known: dict[tuple[tuple[int, int], ...], tuple[Holdings, int]] = {}
    tensors: list[Tensor] = []
    for name, places in found.items():
        key = tuple(places)
        held = [(slot, described[slot][index]) for slot, index in places]
        if key not in known:
            _check_alike(name, held, side)
            known[key] = _holdings(held), max(len(part.pieces) for _, part in held)
        holdings, num_buffers = known[key]
        if len(holdings.slots):
            buffers = tuple(buffer_name(name, piece) for piece in range(num_buffers))
            tensors.append(Tensor(name, held[0][1].dtype, holdings, buffers))
    return Layout(tensors, described)


def trim(layout: Layout, shapes: Mapping[str, Shape]) -> Layout:
    """The same layout, with tensors of these names cut down to these shapes. The rest of their memory is padding."""
    tensors: list[Tensor] = []
    for tensor in layout:
        shape, held = shapes.get(tensor.name, tensor.shape), tensor.holdings
        if shape != tensor.shape:
            stop = np.minimum(held.stop, np.array(shape))
            kept = np.all(held.start < stop, axis=1)
            rows = (held.start[kept], stop[kept], held.offset[kept], held.strides[kept], held.buffer[kept])
            tensor = replace(tensor, holdings=Holdings(shape, held.slots[kept], *rows, held.sizes))
        tensors.append(tensor)
    return Layout(tensors, layout.slots)


def _check_alike(name: str, held: Sequence[tuple[int, Held]], side: str) -> None:
    slot, first = held[0]
    for other, part in held[1:]:
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            raise Disagreement(
                f"{name}: in the {side}, rank {slot} has {first.dtype} {list(first.shape)} and rank {other} has "
                f"{part.dtype} {list(part.shape)}; these are the sizes of the whole tensor, and must agree"
            )


def _check_apart(slot: int, held: Held, side: str) -> None:
    for index, piece in enumerate(held.pieces):
        if any(piece.overlaps(other) for other in held.pieces[:index]):
            raise Disagreement(
                f"{held.names[0]}: in the {side}, rank {slot} lists the block at {list(piece.start)} of size "
                f"{list(piece.extent)} and another one that overlaps it; each element may be listed once a rank"
            )


def _holdings(held: Sequence[tuple[int, Held]]) -> Holdings:
    shape = held[0][1].shape or (1,)
    rows = [(slot, number, piece) for slot, part in held for number, piece in enumerate(part.pieces)]
    boxes = list(_boxes(rows, len(shape)))
    table = np.array(boxes, dtype=np.int64).reshape(len(boxes), 3, len(shape))
    return Holdings(
        shape,
        np.array([slot for slot, _, _ in rows], dtype=np.int64),
        table[:, 0],
        table[:, 1],
        np.zeros(len(rows), dtype=np.int64),
        table[:, 2],
        np.array([number for _, number, _ in rows], dtype=np.int64),
        tuple((slot, number, piece.size) for slot, number, piece in rows),
    )


def _boxes(rows: Sequence[tuple[int, int, Piece]], num_dims: int) -> Iterator[tuple[Shape, Shape, Shape]]:
    for _, _, piece in rows:
        if piece.start:
            stop = tuple(a + n for a, n in zip(piece.start, piece.extent, strict=True))
            yield piece.start, stop, piece.strides
        else:
            yield (0,) * num_dims, (1,) * num_dims, (1,) * num_dims
