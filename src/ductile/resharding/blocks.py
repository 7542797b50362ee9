"""A rank's part of a tensor as blocks: rectangles of the whole tensor, and the local memory that has them.

Whatever a framework calls its shards, they end here: a DTensor's local tensor is one block, or one a strip where the
placement is strided; a plain tensor is one block that covers everything. Blocks are views: moving a state reads and
writes the caller's own memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ductile.core.layout.geometry.layout import ITEM_BYTES
from ductile.core.transfer.cells import NotReshardable
from ductile.resharding.described import Piece
from ductile.resharding.placements import Cut, held_runs


@dataclass(frozen=True, eq=False)
class Block:
    """`data` is what the whole tensor of `shape` has from `start` on.

        Block((8, 4), (2, 0), local)       rows 2 and 3 of eight, if `local` is 2 x 4

    `data` may be a view with any strides, and may be empty.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    data: Tensor
    padded: bool = False
    """Whether the whole tensor may have another length on the other side; what both sides have is moved."""

    @cached_property
    def piece(self) -> Piece:
        return Piece(self.start, tuple(self.data.shape), tuple(self.data.stride()))

    @cached_property
    def memory(self) -> Tensor:
        """Memory of the block from its first element to its last, flat, with whatever lies between."""
        return self.data.as_strided((self.piece.size,), (1,), self.data.storage_offset())

    def beside(self, whole: Tensor, other: Tensor) -> "Block":
        """The same block of `other`, which lies as `whole` does, the tensor that `data` is a view of."""
        offset = other.storage_offset() + self.data.storage_offset() - whole.storage_offset()
        return Block(self.shape, self.start, other.as_strided(self.data.shape, self.data.stride(), offset))


class KnownBlocks:
    """`blocks_of` the tensors of one state, which remembers those of the state before: what still lies as it did is not
    described again."""

    def __init__(self, before: "KnownBlocks | None" = None) -> None:
        self._before = before._now if before is not None else {}
        self._now: dict[int, tuple[Tensor, tuple[object, ...], list[Block]]] = {}
        """Tensors by their id: (the tensor, how it lies, its blocks)."""

    def of(self, name: str, tensor: Tensor) -> list[Block]:
        """The blocks of a tensor. To be called without gradients."""
        known = self._before.get(id(tensor))
        if known is None or known[0] is not tensor or known[1] != _lying(tensor):
            blocks = blocks_of(name, tensor)
            known = tensor, _lying(tensor), blocks  # not before: what is no plain memory has no address
        self._now[id(tensor)] = known
        return known[2]

    def forget(self) -> None:
        """Forget the state before: all tensors of this one are known."""
        self._before = {}


def _lying(tensor: Tensor) -> tuple[object, ...]:
    """All that a tensor's blocks follow from."""
    local, mesh, placements = tensor, None, None
    if isinstance(tensor, DTensor):
        local, mesh, placements = tensor.to_local(), tensor.device_mesh, tensor.placements
    return local.data_ptr(), local.shape, local.stride(), local.dtype, tensor.shape, mesh, placements


def blocks_of(name: str, tensor: Tensor) -> list[Block]:
    """A DTensor's local part, or all of a plain tensor. At least one block; an empty one where nothing is held.

    To be called without gradients.
    """
    if not isinstance(tensor, DTensor):
        return [Block(tuple(tensor.shape), (0,) * tensor.ndim, plain(name, tensor.detach()))]
    shape, local = tuple(tensor.shape), plain(name, tensor.to_local().detach())
    cuts = _cuts(name, tensor)
    if cuts is None or not local.numel():
        return [Block(shape, (0,) * len(shape), local.new_empty((0,) * len(shape)))]
    try:
        runs = _runs(shape, cuts, tuple(local.shape))
    except ValueError as error:
        raise NotReshardable(
            f"{name}, {list(shape)} with {tensor.placements} on {tensor.device_mesh}: {error}"
        ) from None
    return list(_products(shape, runs, local))


_runs = lru_cache(maxsize=10_000)(held_runs)


def _cuts(name: str, tensor: DTensor) -> tuple[Cut, ...] | None:
    """The cuts that make this rank's part of a DTensor; None on a rank outside the mesh."""
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None:
        return None
    cuts: list[Cut] = []
    for size, coordinate, placement in zip(tensor.device_mesh.shape, coordinates, tensor.placements, strict=True):
        if isinstance(placement, Partial):
            raise NotReshardable(
                f"{name} has placements {tensor.placements}: its ranks hold terms of a sum. Sum them first, "
                "with tensor.redistribute(placements=...), and pass the result"
            )
        if isinstance(placement, _StridedShard):
            cuts.append(Cut(placement.dim % tensor.ndim, size, coordinate, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            cuts.append(Cut(placement.dim % tensor.ndim, size, coordinate))
        elif not placement.is_replicate():
            raise NotReshardable(f"{name} has a placement that is not known here: {placement}")
    return tuple(cuts)


def _products(shape: tuple[int, ...], runs: list[list[tuple[int, int, int]]], local: Tensor) -> Iterator[Block]:
    for picked in product(*runs):
        data = local
        for dim, (_, at, length) in enumerate(picked):
            data = data.narrow(dim, at, length)
        yield Block(shape, tuple(start for start, _, _ in picked), data)


def plain(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself. Raises `NotReshardable` for what is not simply memory with strides."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        kind = type(tensor).__name__ if type(tensor) is not Tensor else f"tensor with layout {tensor.layout}"
        raise NotReshardable(f"{name} is a {kind}; only tensors that are plain memory can be moved")
    if tensor.is_meta:
        raise NotReshardable(f"{name} is on the meta device and has no memory; call module.to_empty(device=...) first")
    if dtype not in ITEM_BYTES:
        raise NotReshardable(f"{name} has dtype {dtype}; one of {', '.join(ITEM_BYTES)} can be moved")
    if any(stride == 0 and count > 1 for stride, count in zip(tensor.stride(), tensor.shape, strict=True)):
        raise NotReshardable(f"{name} is an expanded view, several elements in one place; pass a copy of it")
    return tensor
