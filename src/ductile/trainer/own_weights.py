"""A rank's own boxes of the weights, as they are published: read where they lie, copied and summed up in one pass.

Between them the ranks of a layout have each number once, so that nobody has to gather a tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ductile.core.layout.geometry.holdings import Box
from ductile.core.layout.model.parameters import frozen_names, parameters
from ductile.core.layout.model.spec import ModelSpec
from ductile.fabric.boxes import BoxCopy
from ductile.messages.updates import TensorBox
from ductile.parallel.parts import SlotParts
from ductile.trainer.state import MODEL
from ductile.trainer.trainer import Trainer
from ductile.weights.buckets import OwnedTensor
from ductile.weights.digest import box_digest, copy_all_with_digest, copy_with_digest

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

    def tensors(self, with_frozen: bool = True) -> list[OwnedTensor]:
        """Return every tensor of the version, with this rank's boxes. All ranks have the same tensors. with_frozen:
        those that are not trained, too."""
        return [
            OwnedTensor(each.name, self.dtype, each.shape, self.parts.shared(each.name))
            for each in parameters(self.spec)
            if with_frozen or each.is_trained
        ]

    def copy(self, name: str, box: Box, target: Tensor) -> int:
        """Copy a box to one of the published dtype, on the CPU, and return its digest."""
        view = self._view(name, box)
        if self._is_as_published(view):
            return copy_with_digest(name, target, view, box[0])
        return sum(
            copy_with_digest(name, target[rows], view[rows], start) for start, rows in _blocks(box, view, self.dtype)
        )

    def copy_boxes(self, boxes: Sequence[TensorBox], bucket: Tensor) -> list[int]:
        """Copy boxes to their places in a bucket (uint8, on the CPU), and return the digest of each."""
        parts: list[int | None] = [None] * len(boxes)
        if all(self._is_as_published(self.local[box.name]) for box in boxes):
            address = bucket.data_ptr()
            copies = [self._copy_of(box, address) for box in boxes]
            parts = copy_all_with_digest([box.name for box in boxes], copies)
        return [
            self._copy_to_bucket(box, bucket) if part is None else part for box, part in zip(boxes, parts, strict=True)
        ]

    def _copy_of(self, box: TensorBox, bucket_address: int) -> BoxCopy:
        local = self.local[box.name]
        view = self.parts.place(box.name, (box.start, box.stop))
        source = local.data_ptr() + view.offset * local.element_size()
        target = bucket_address + box.offset_bytes
        return BoxCopy(target, None, source, view.strides, view.shape, local.element_size(), box.start)

    def _copy_to_bucket(self, box: TensorBox, bucket: Tensor) -> int:
        target = bucket[box.offset_bytes : box.offset_bytes + box.num_bytes].view(self.dtype)
        shape = [stop - start for start, stop in zip(box.start, box.stop, strict=True)]
        return self.copy(box.name, (box.start, box.stop), target.view(shape))

    def _is_as_published(self, tensor: Tensor) -> bool:
        return tensor.dtype == self.dtype and tensor.is_cpu

    def digest(self, name: str, box: Box) -> int:
        """Return the digest of a box as it is published."""
        view = self._view(name, box)
        return sum(box_digest(name, view[rows].to(self.dtype), start) for start, rows in _blocks(box, view, self.dtype))

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the tensors that are not trained."""
        return frozen_names(self.spec)

    def digest_of_frozen(self) -> int:
        """Return the digest of this rank's boxes of the tensors that are not trained, as they would be published."""
        return sum(self.digest(name, box) for name in self.frozen for box in self.parts.shared(name))

    def _view(self, name: str, box: Box) -> Tensor:
        return self.parts.view(name, self.local[name], box)


def _blocks(box: Box, view: Tensor, dtype: torch.dtype) -> Iterator[tuple[tuple[int, ...], slice]]:
    """Yield the rows of a box in blocks of about `PIECE_BYTES`, as published in `dtype`; `GPU_PIECE_BYTES` where its
    `view` lies on a GPU. Each is the index in the whole tensor at which it begins, and its rows in the box:
    ((6, 0), slice(2, 4)) of a box that begins at (4, 0)."""
    (first, *columns), _ = box
    most = GPU_PIECE_BYTES if view.is_cuda else PIECE_BYTES
    num_rows = max(1, most * len(view) // (view.numel() * dtype.itemsize))
    for row in range(0, len(view), num_rows):
        yield (first + row, *columns), slice(row, row + num_rows)
