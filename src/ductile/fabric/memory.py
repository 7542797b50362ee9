"""One slot's buffers under a layout, addressed by the boxes of tensors.

Everything here is words of the tensors' size: integers, whatever the dtype, so that NaN payloads, negative zeros and
denormals are only bits.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ductile.core.layout.geometry.holdings import Box, View
from ductile.core.layout.geometry.layout import Layout
from ductile.fabric import boxes

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by the bytes of an item."""


class Place(NamedTuple):
    """Place of a box in memory, whether or not its buffer is there yet."""

    buffer: str
    view: View


class Memory:
    """Buffers by the names that the layout gives them. Contiguous, of any shape, on any device."""

    def __init__(self, layout: Layout, slot: int, buffers: Mapping[str, torch.Tensor]) -> None:
        """Raises `ValueError` when a buffer that the layout lists is missing or is not what it says."""
        self.layout = layout
        self.slot = slot
        self.sizes = layout.buffer_sizes(slot)
        self._words: dict[str, torch.Tensor] = {}
        for name in self.sizes:
            self.take(name, buffers)

    @classmethod
    def empty(cls, layout: Layout, slot: int) -> "Memory":
        """A memory without buffers; they come one by one through `add`."""
        memory = cls(Layout((), (slot,)), slot, {})
        memory.layout, memory.sizes = layout, layout.buffer_sizes(slot)
        return memory

    def take(self, name: str, buffers: Mapping[str, torch.Tensor]) -> None:
        if name not in buffers:
            raise ValueError(f"slot {self.slot} has no buffer {name!r}, which its layout lists")
        self.add(name, buffers[name])

    def add(self, name: str, buffer: torch.Tensor) -> None:
        dtype, size = self.sizes[name]
        if str(buffer.dtype) != f"torch.{dtype}" or buffer.numel() != size or not buffer.is_contiguous():
            stored = "contiguous" if buffer.is_contiguous() else "strided"
            raise ValueError(
                f"buffer {name!r} of slot {self.slot} is {stored}, {buffer.dtype}, {buffer.numel()} elements; its "
                f"layout says contiguous, {dtype}, {size} elements"
            )
        self._words[name] = buffer.detach().view(-1).view(WORDS[buffer.element_size()])

    def drop(self, name: str) -> None:
        del self._words[name]

    def __contains__(self, name: str) -> bool:
        return name in self._words

    def __iter__(self) -> Iterator[str]:
        return iter(self._words)

    def words(self, name: str) -> torch.Tensor:
        """A whole buffer, flat."""
        return self._words[name]

    def buffer(self, name: str, box: Box) -> str:
        """The name of the buffer that has this box of this tensor."""
        return self.place(name, box).buffer

    def place(self, name: str, box: Box) -> Place:
        tensor = self.layout[name]
        view = tensor.holdings.view(self.slot, box)
        return Place(tensor.buffer(view.buffer), view)

    def at(self, place: Place) -> torch.Tensor:
        """A block of a tensor where it lies, strided as it lies there."""
        words, view = self._words[place.buffer], place.view
        return words.as_strided(view.shape, view.strides, words.storage_offset() + view.offset)

    def box(self, name: str, box: Box) -> torch.Tensor:
        return self.at(self.place(name, box))


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a view of a tensor on the CPU. After `Tensor.numpy` torch would never again let the memory be freed and
    filled while tensors refer to it (`ductile.trainer.parking`)."""
    return np.from_dlpack(tensor)


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy words from box to box; the two do not overlap."""
    if source.device.type == target.device.type == "cpu":
        boxes.copy(as_array(target), as_array(source))
    else:
        target.copy_(source)


def pack(box: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy a box, row-major, into as many bytes."""
    if packed.storage_offset() % box.element_size():
        packed.copy_(box.contiguous().view(-1).view(torch.uint8))
    else:
        copy(box, packed.view(box.dtype).view(box.shape))


def unpack(packed: torch.Tensor, box: torch.Tensor) -> None:
    """The reverse of `pack`."""
    whole = packed.clone() if packed.storage_offset() % box.element_size() else packed
    copy(whole.view(box.dtype).view(box.shape), box)


def flat_bytes(box: torch.Tensor) -> torch.Tensor | None:
    """The bytes of a contiguous box where they lie; None when it is strided."""
    return box.view(-1).view(torch.uint8) if box.is_contiguous() else None


def num_bytes(box: torch.Tensor) -> int:
    return prod(box.shape) * box.element_size()
