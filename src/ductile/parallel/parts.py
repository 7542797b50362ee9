"""A slot's part of a model's tensors: boxes of the whole tensors, as views of the slot's own memory.

Which boxes these are follows from the layout (`ductile.core.layout.geometry.strategy.model_layout`), so nothing here
knows an axis. Parameters, moments and gradients of one parameter all lie alike.
"""

from functools import lru_cache

from torch import Tensor

from ductile.core.layout.geometry.holdings import Box, View, volume
from ductile.core.layout.geometry.layout import Layout
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.strategy import block_layout, model_layout
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.transfer.cells import Atoms, atoms
from ductile.core.transfer.owners import owned_boxes, shared_boxes

REMEMBERED_LAYOUTS = 32
"""Most layouts that are remembered; the least recently used one goes first."""


class SlotParts:
    """Knows where each of a slot's numbers belongs. `local` is always the slot's part of the tensor `name`, flat."""

    def __init__(self, layout: Layout, slot: int) -> None:
        self._layout, self._slot = layout, slot
        self._turns = {tensor.name: turn for turn, tensor in enumerate(layout)}
        self._atoms: dict[bytes, Atoms] = {}
        self._owned: dict[str, list[Box]] = {}

    @staticmethod
    @lru_cache(maxsize=REMEMBERED_LAYOUTS)
    def of(spec: ModelSpec, parallel: ParallelLayout, slot: int) -> "SlotParts":
        """The slot's part of the model's parameters, by their names."""
        return SlotParts(model_layout(spec, parallel), slot)

    @staticmethod
    @lru_cache(maxsize=REMEMBERED_LAYOUTS)
    def of_blocks(spec: ModelSpec, parallel: ParallelLayout, slot: int) -> "SlotParts":
        """The slot's part of the scales of 8-bit moments, by their parameters' names."""
        return SlotParts(block_layout(spec, parallel), slot)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._layout[name].shape

    def held(self, name: str) -> list[Box]:
        """The boxes that this slot holds, whoever owns them."""
        return [(start, stop) for start, stop, *_ in self._layout[name].holdings.rows_of(self._slot)]

    def place(self, name: str, box: Box) -> View:
        """Place of a box that this slot holds, in its own memory."""
        return self._layout[name].holdings.view(self._slot, box)

    def view(self, name: str, local: Tensor, box: Box) -> Tensor:
        """A box that this slot holds, in its own memory."""
        view = self.place(name, box)
        return local.as_strided(view.shape, view.strides, local.storage_offset() + view.offset)

    def owned_views(self, name: str, local: Tensor) -> list[Tensor]:
        """The numbers that this slot owns, in its own memory: all of `local` in one piece where it owns all of it."""
        boxes = self.owned(name)
        if not boxes:
            return []
        if len(boxes) == len(self._layout[name].holdings.rows_of(self._slot)) and local.numel() == sum(
            volume(box) for box in boxes
        ):
            return [local]
        return [self.view(name, local, box) for box in boxes]

    def owned(self, name: str) -> list[Box]:
        """The boxes that this slot owns (`ductile.core.transfer.owners`)."""
        if name not in self._owned:
            self._owned[name] = owned_boxes(self._atoms_of(name), self._slot, self._turns[name])
        return self._owned[name]

    def shared(self, name: str) -> list[Box]:
        """The boxes that this slot sends where all slots send a tensor between them, each as much as the others."""
        return shared_boxes(self._atoms_of(name), self._slot, self._turns[name])

    def _atoms_of(self, name: str) -> Atoms:
        holdings = self._layout[name].holdings
        if holdings.geometry not in self._atoms:
            self._atoms[holdings.geometry] = atoms(holdings)
        return self._atoms[holdings.geometry]
