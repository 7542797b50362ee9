"""A version beside the live one: its boxes are copied in while the engine generates, and a commit changes over to it
between two steps, by swapping the tensors' storage."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from operator import mul, sub
from typing import NamedTuple

import torch
from torch import Tensor

from ductile.fabric.boxes import BoxCopy
from ductile.fabric.fingerprint import MODULUS
from ductile.messages.updates import Bucket, Digest, TensorBox, TensorSpec
from ductile.weights.digest import copy_all_with_digest, copy_with_digest
from ductile.weights.live_weights import LiveWeights, VersionTensors
from ductile.weights.overwrite import overwrite

Swap = Callable[[Mapping[str, Tensor], int], None]
"""Has an engine sample from these tensors, of this version, from its next step on."""


class _Target(NamedTuple):
    """Memory of a tensor on the CPU that has the published dtype."""

    address: int
    strides: tuple[int, ...]
    item_bytes: int

    def copy_of(self, box: TensorBox, bucket_address: int) -> BoxCopy:
        """Return the copy of a box from its bucket to here."""
        target = self.address + self.item_bytes * sum(map(mul, box.start, self.strides))
        shape = tuple(map(sub, box.stop, box.start))
        return BoxCopy(target, self.strides, bucket_address + box.offset_bytes, None, shape, self.item_bytes, box.start)


class StagedWeights:
    """One version's tensors, from `prepare` until `commit` or `abort`. `load` may be called from any thread."""

    def __init__(self, live: LiveWeights, version: int, in_place: bool = False) -> None:
        """in_place: boxes overwrite the live tensors, which takes no memory: until the commit nothing may be sampled,
        and an abort leaves weights that are of no version."""
        self.version, self.in_place = version, in_place
        self._live = live
        self._new: VersionTensors | None = None
        self._made: dict[str, Tensor] = {}
        """Tensors that were made for this version: all but those that it has in common with the live one."""
        self._boxes: dict[str, dict[tuple[int, ...], TensorBox]] = {}
        """Boxes of each tensor, by their start."""
        self._places: dict[str, _Target] = {}
        """Places of tensors whose boxes are copied many at once."""
        self._summed: dict[str, dict[tuple[int, ...], tuple[int, int]]] = {}
        """Boxes of each tensor, by their start, whose digest was taken as they were copied: elements and part."""

    def prepare(
        self, tensors: Sequence[TensorSpec], boxes: Sequence[TensorBox], base_version: int | None = None
    ) -> None:
        """Make room for boxes that together are each tensor exactly once; with `base_version` what they leave out is
        the live version's. Raises `ValueError`, with a sentence, where they are not this model's."""
        current = self._live.current
        if base_version is not None and base_version != current.version:
            raise ValueError(
                f"version {self.version} says what changed since {base_version}, and {current.version} is live here"
            )
        dtypes = _dtypes(tensors, current, whole=base_version is None)
        of_name: dict[str, list[TensorBox]] = {name: [] for name in current.tensors}
        for box in boxes:
            if box.name not in dtypes:
                raise ValueError(f"a bucket has a box of {box.name}, which is not among the tensors")
            of_name[box.name].append(box)
        for name, live in current.tensors.items():
            _check_boxes(name, tuple(live.shape), dtypes.get(name), of_name[name], whole=base_version is None)
        for name, live in current.tensors.items():
            if of_name[name] and not self.in_place:
                self._made[name] = self._live.room(name)
                if base_version is not None and _volume(of_name[name]) < live.numel():
                    self._made[name].copy_(live)
        self._boxes = {name: {box.start: box for box in of_tensor} for name, of_tensor in of_name.items()}
        self._summed = {name: {} for name, of_tensor in of_name.items() if of_tensor}
        kept = {name: part for name, part in current.parts.items() if not of_name[name]}
        new = VersionTensors(self.version, {**current.tensors, **self._made}, {**current.dtypes, **dtypes}, parts=kept)
        self._places = {
            name: _Target(tensor.data_ptr(), tensor.stride(), tensor.element_size())
            for name, tensor in new.tensors.items()
            if tensor.dtype == new.dtypes[name] and tensor.is_cpu
        }
        self._new = new

    def load(self, bucket: Bucket, buffer: Tensor) -> None:
        """Copy a bucket's boxes in. buffer: uint8 on the CPU; it may be used again afterwards. Raises `ValueError` for
        a box that `prepare` has not heard of, or that ends behind the buffer."""
        new = self._new  # an abort meanwhile leaves its memory to this call
        if new is None:
            raise ValueError(f"version {self.version} is not staged any more")
        for box in bucket.boxes:
            if self._boxes[box.name].get(box.start) != box:
                raise ValueError(f"a box of {box.name} at {list(box.start)} is none of version {self.version}")
            if box.offset_bytes + box.num_bytes > buffer.numel():
                raise ValueError(f"a box of {box.name} ends behind the {buffer.numel()} bytes of its bucket")
        placed = [(box, self._places[box.name]) for box in bucket.boxes if box.name in self._places]
        address = buffer.data_ptr()
        copies = [place.copy_of(box, address) for box, place in placed]
        parts = copy_all_with_digest([box.name for box, _ in placed], copies, past_cache=True)
        left = [box for box in bucket.boxes if box.name not in self._places]
        for (box, place), part in zip(placed, parts, strict=True):
            if part is None:
                left.append(box)
            else:
                self._summed[box.name][box.start] = box.num_bytes // place.item_bytes, part
        for box in left:
            self._load_alone(new, box, buffer)

    def _load_alone(self, new: VersionTensors, box: TensorBox, buffer: Tensor) -> None:
        values, dtype = buffer[box.offset_bytes : box.offset_bytes + box.num_bytes], new.dtypes[box.name]
        if values.storage_offset() % dtype.itemsize:
            values = values.clone()
        target = _box_of(new.tensors[box.name], box)
        values = values.view(dtype).view(target.shape)
        if target.dtype != dtype or target.device != values.device:
            overwrite(target, values)
            return
        part = copy_with_digest(box.name, target, values, box.start, past_cache=True)
        self._summed[box.name][box.start] = values.numel(), part

    def digest(self) -> Digest:
        """Return the digest of what is staged. What was summed up as it was copied is not read again."""
        assert self._new is not None
        for name, boxes in self._summed.items():
            if sum(num_elements for num_elements, _ in boxes.values()) == self._new.tensors[name].numel():
                self._new.parts[name] = sum(part for _, part in boxes.values()) % MODULUS
        return self._new.digest()

    def commit(self, swap: Swap) -> None:
        """Make the version live. To be called between two steps of the engine."""
        assert self._new is not None
        swap(self._new.tensors, self.version)
        self._live.replace(self._new)
        self._made, self._new = {}, None

    def abort(self) -> None:
        """Free what was staged; the live version goes on. What is under way in `load` ends, and more is refused. A
        version that is live by now stays, and so does the memory of the one before, for the next one."""
        if self._new is not None:
            self._live.free()
        self._made, self._new = {}, None


def _dtypes(tensors: Sequence[TensorSpec], current: VersionTensors, whole: bool) -> dict[str, torch.dtype]:
    """Return the dtypes that tensors are published in. Raises `ValueError` where the tensors are not this model's."""
    ours = current.tensors
    named = {tensor.name: tensor for tensor in tensors}
    wrong = named.keys() ^ ours.keys() if whole else named.keys() - ours.keys()
    if wrong:
        raise ValueError(f"it is of another model: {', '.join(sorted(wrong)[:5])} on one side only")
    dtypes: dict[str, torch.dtype] = {}
    for name, tensor in named.items():
        if tensor.shape != tuple(ours[name].shape):
            raise ValueError(f"{name} has shape {list(tensor.shape)}, and {list(ours[name].shape)} in this model")
        dtype = vars(torch).get(tensor.dtype)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has the unknown dtype {tensor.dtype!r}")
        if torch.promote_types(dtype, ours[name].dtype) != ours[name].dtype:
            raise ValueError(
                f"{name} comes in {tensor.dtype}, and this server holds it in {ours[name].dtype}, which cannot take "
                f'all its values: start the server with model.dtype = "{tensor.dtype}", or publish what it holds'
            )
        dtypes[name] = dtype
    return dtypes


def _check_boxes(
    name: str, shape: tuple[int, ...], dtype: torch.dtype | None, boxes: Sequence[TensorBox], whole: bool
) -> None:
    """Raise `ValueError` unless the boxes lie in the tensor, do not overlap and, where they are to be the whole tensor,
    leave nothing out."""
    for box in boxes:
        assert dtype is not None
        if not (len(box.start) == len(box.stop) == len(shape)) or not all(
            0 <= start <= stop <= size for start, stop, size in zip(box.start, box.stop, shape, strict=True)
        ):
            raise ValueError(f"a box of {name} is {list(box.start)} to {list(box.stop)}, and its shape {list(shape)}")
        if box.num_bytes != _volume([box]) * dtype.itemsize or box.offset_bytes < 0:
            raise ValueError(f"a box of {name} has {box.num_bytes} bytes, and its shape {_volume([box])} elements")
    filled = sorted((box for box in boxes if _volume([box])), key=lambda box: box.start)
    for index, box in enumerate(filled):
        for other in filled[index + 1 :]:
            if shape and other.start[0] >= box.stop[0]:
                break
            if all(a < d and c < b for a, b, c, d in zip(box.start, box.stop, other.start, other.stop, strict=True)):
                raise ValueError(f"two boxes of {name} overlap at {list(other.start)}")
    if whole and _volume(filled) != prod(shape):
        raise ValueError(f"boxes of {name} have {_volume(filled)} of its {prod(shape)} elements: some are missing")


def _box_of(tensor: Tensor, box: TensorBox) -> Tensor:
    for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        if stop - start < tensor.shape[dim]:  # a box is one of thousands, and most are cut along one dim
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _volume(boxes: Sequence[TensorBox]) -> int:
    return sum(prod(b - a for a, b in zip(box.start, box.stop, strict=True)) for box in boxes)
