"""One sender's part of a version, in buckets: a pure function of its boxes and of the bytes that a bucket takes.

    tensors, each with the sender's boxes  ->  Offer

A box that no bucket holds is cut along its leading dims; only a row, the last dim of a matrix, is never cut, and may be
a bucket of its own. Tensors that servers fuse (q, k and v; gate and up) share a bucket where they fit into one. A box
begins in its bucket at a multiple of `ductile.fabric.alignment.ALIGNMENT_BYTES`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ductile.core.layout.geometry.holdings import Box, volume
from ductile.fabric.alignment import aligned
from ductile.messages.updates import Bucket, Offer, TensorBox, TensorSpec

_FUSED = (
    (re.compile(r"\b[qkv]_proj\b"), "qkv_proj"),
    (re.compile(r"\b(gate|up)_proj\b"), "gate_up_proj"),
)


@dataclass(frozen=True, slots=True)
class OwnedTensor:
    """A tensor of the version, and the boxes of it that one sender sends. `shape` is the whole tensor's, `dtype` the
    one that is published."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Sequence[Box]


def offer_of(sender: str, tensors: Iterable[OwnedTensor], bucket_bytes: int) -> Offer:
    """Return what a sender offers, in the order of the tensors. Those of which it has nothing may be among them; a
    sender may have nothing at all.

    Raises ValueError where `bucket_bytes` is less than 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"a bucket of a weight update has at least 1 byte, not {bucket_bytes}")
    ours = [tensor for tensor in tensors if any(map(volume, tensor.boxes))]
    groups = [
        [
            TensorBox(tensor.name, *piece, 0, volume(piece) * tensor.dtype.itemsize)
            for tensor in fused
            for box in tensor.boxes
            for piece in _pieces(box, tensor.dtype.itemsize, bucket_bytes)
        ]
        for _, fused in groupby(ours, key=lambda tensor: _fused(tensor.name))
    ]
    specs = tuple(TensorSpec(tensor.name, dtype_name(tensor.dtype), tensor.shape) for tensor in ours)
    return Offer(sender, specs, tuple(_packed(groups, bucket_bytes)))


def only(offer: Offer, bucket_bytes: int, is_wanted: Callable[[TensorBox], bool]) -> Offer:
    """Return the offer with those of its boxes alone that are wanted, packed anew."""
    boxes = [box for bucket in offer.buckets for box in bucket.boxes if is_wanted(box)]
    names = {box.name for box in boxes}
    groups = [list(fused) for _, fused in groupby(boxes, key=lambda box: _fused(box.name))]
    specs = tuple(spec for spec in offer.tensors if spec.name in names)
    return Offer(offer.sender, specs, tuple(_packed(groups, bucket_bytes)))


def num_bytes_of(offer: Offer) -> int:
    """Return the bytes of all boxes."""
    return sum(box.num_bytes for bucket in offer.buckets for box in bucket.boxes)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pieces(box: Box, item_bytes: int, most: int, dim: int = 0) -> Iterator[Box]:
    """Return a box in pieces of at most so many bytes, cut along `dim` and, where one index of it is too much, those
    after it."""
    start, stop = box
    num_bytes = volume(box) * item_bytes
    if num_bytes <= most or dim >= min(len(start), max(1, len(start) - 1)):
        if num_bytes:
            yield box
        return
    step = most // (num_bytes // (stop[dim] - start[dim]))
    for low in range(start[dim], stop[dim], step or 1):
        high = min(low + (step or 1), stop[dim])
        piece = (*start[:dim], low, *start[dim + 1 :]), (*stop[:dim], high, *stop[dim + 1 :])
        yield from [piece] if step else _pieces(piece, item_bytes, most, dim + 1)


def _packed(groups: Iterable[Sequence[TensorBox]], most: int) -> Iterator[Bucket]:
    index, end = 0, 0
    boxes: list[TensorBox] = []
    for group in groups:
        num_bytes = sum(aligned(box.num_bytes) for box in group[:-1]) + group[-1].num_bytes
        fits_alone = num_bytes <= most
        for place, box in enumerate(group):
            needed = num_bytes if fits_alone and not place else box.num_bytes
            if boxes and aligned(end) + needed > most:
                yield Bucket(index, end, tuple(boxes))
                index, end, boxes = index + 1, 0, []
            offset = aligned(end)
            boxes.append(TensorBox(box.name, box.start, box.stop, offset, box.num_bytes))
            end = offset + box.num_bytes
    if boxes:
        yield Bucket(index, end, tuple(boxes))


def _fused(name: str) -> str:
    """Return the name of the tensor of which a server makes this one a part."""
    for part, whole in _FUSED:
        name = part.sub(whole, name)
    return name
