"""Which slots work together, and in which order: named axes over slot ids.

An axis's name says what it does to a tensor; `ductile.core.layout.geometry.strategy` has the table. Any set of slots in
any order makes a mesh: `Mesh((("dp_shard", 3), ("tp", 2)), (7, 0, 4, 1, 9, 2))` has dp_shard 0 = slots 7 and 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod


@dataclass(frozen=True)
class Mesh:
    """Axes from the outermost to the innermost, and the slots in that row-major order."""

    axes: tuple[tuple[str, int], ...]
    slots: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = dict(self.axes)
        if len(sizes) != len(self.axes) or min(sizes.values(), default=1) < 1:
            raise ValueError(f"axes {self.axes}: names must differ and sizes be at least 1")
        if prod(sizes.values()) != len(self.slots):
            raise ValueError(f"axes {self.axes} need {prod(sizes.values())} slots; {len(self.slots)} were given")
        if len(set(self.slots)) != len(self.slots):
            raise ValueError(f"slots {self.slots}: one slot appears twice")

    @staticmethod
    def of(slots: Iterable[int], **axes: int) -> "Mesh":
        """The mesh of these slots with these axes: `Mesh.of(range(8), dp_shard=4, tp=2)`."""
        return Mesh(tuple(axes.items()), tuple(slots))

    def size(self, axes: Sequence[str]) -> int:
        """How many parts these axes make together. An axis that the mesh lacks has size 1."""
        sizes = dict(self.axes)
        return prod(sizes.get(axis, 1) for axis in axes)

    def coordinate(self, slot: int, axes: Sequence[str]) -> int:
        """A slot's place along these axes taken together, the first one outermost."""
        index, sizes, coordinates = 0, dict(self.axes), self._coordinates[slot]
        for axis in axes:
            index = index * sizes.get(axis, 1) + coordinates.get(axis, 0)
        return index

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Sets of slots that differ only along these axes, each ordered by `coordinate` along them."""
        others = [axis for axis, _ in self.axes if axis not in axes]
        found: dict[int, list[int]] = {}
        for slot in self.slots:
            found.setdefault(self.coordinate(slot, others), []).append(slot)
        return [tuple(sorted(group, key=lambda slot: self.coordinate(slot, axes))) for group in found.values()]

    def around(self, slot: int, *products: Sequence[str]) -> "Mesh":
        """The mesh of the slots that differ from `slot` along these axes alone. Axes that come together become one, the
        first of them outermost: `around(0, ("dp_replicate",), ("dp_shard", "cp"))` has dp_replicate and dp_shard_cp.
        """
        group = next(group for group in self.groups([axis for axes in products for axis in axes]) if slot in group)
        return Mesh(tuple(("_".join(axes), self.size(axes)) for axes in products), group)

    @cached_property
    def _coordinates(self) -> dict[int, dict[str, int]]:
        names = [axis for axis, _ in self.axes]
        places = product(*(range(size) for _, size in self.axes))
        return {slot: dict(zip(names, place, strict=True)) for slot, place in zip(self.slots, places, strict=True)}
