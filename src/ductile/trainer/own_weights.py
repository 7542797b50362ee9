"""A rank's own boxes of the weights, as they are published: read where they lie, copied and summed up in one pass.

Between them the ranks of a layout have each number once, so that nobody has to gather a tensor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ductile.core.layout.geometry.holdings import Box
from ductile.core.layout.model.parameters import parameters
from ductile.core.layout.model.spec import ModelSpec
from ductile.parallel.parts import SlotParts
from ductile.trainer.state import MODEL
from ductile.trainer.trainer import Trainer
from ductile.weights.buckets import OwnedTensor
from ductile.weights.digest import box_digest, copy_with_digest

PIECE_BYTES = 1 << 20
"""Bytes that are converted and summed up at a time: what was copied is in the cache when it is summed up."""
GPU_PIECE_BYTES = 16 << 20
"""Bytes that come from a GPU at a time: many enough for the way, and what the GPU needs beside them stays small."""


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """A rank's part of the weights in one layout."""

    spec: ModelSpec
    parts: SlotParts
    local: Mapping[str, Tensor]
    """This rank's part of each parameter, flat, as the optimizer has it."""
    dtype: torch.dtype
    """Dtype that is published."""

    @staticmethod
    def of(trainer: Trainer, state: Mapping[str, Tensor]) -> "OwnWeights":
        """Return those of a trainer. state: this rank's part of its state (`trainer.state`)."""
        local = {name.removeprefix(MODEL): flat for name, flat in state.items() if name.startswith(MODEL)}
        return OwnWeights(trainer.spec, trainer.parts, local, trainer.precision.compute)

    def tensors(self) -> list[OwnedTensor]:
        """Return every tensor of the version, with this rank's boxes. All ranks have the same tensors."""
        return [
            OwnedTensor(each.name, self.dtype, each.shape, self.parts.shared(each.name))
            for each in parameters(self.spec)
        ]

    def copy(self, name: str, box: Box, target: Tensor) -> int:
        """Copy a box to one of the published dtype, on the CPU, and return its digest."""
        view = self._view(name, box)
        if view.dtype == self.dtype and not view.is_cuda:
            return copy_with_digest(name, target, view, box[0])
        return sum(
            copy_with_digest(name, piece, part, start) for start, piece, part in _pieces(box, self.dtype, target, view)
        )

    def digest(self, name: str, box: Box) -> int:
        view = self._view(name, box)
        return sum(
            box_digest(name, piece.to(self.dtype), start) for start, piece, _ in _pieces(box, self.dtype, view, view)
        )

    def _view(self, name: str, box: Box) -> Tensor:
        return self.parts.view(name, self.local[name], box)


def _pieces(
    box: Box, dtype: torch.dtype, one: Tensor, other: Tensor
) -> Iterator[tuple[tuple[int, ...], Tensor, Tensor]]:
    """Rows of two tensors of a box's shape, so many at a time, and where they begin in the whole tensor."""
    (first, *columns), (stop, *_) = box
    most = GPU_PIECE_BYTES if other.is_cuda else PIECE_BYTES
    num_rows = max(1, most * len(one) // (one.numel() * dtype.itemsize))
    starts = ((row, *columns) for row in range(first, stop, num_rows))
    return zip(starts, one.split(num_rows), other.split(num_rows), strict=True)
