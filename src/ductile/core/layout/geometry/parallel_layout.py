"""Which slots work together on one model, along which axes, and what each of them has of samples and state.

    layout = ParallelLayout.of(range(8), dp_replicate=2, tp=2)     2 copies, each of 2 shards, each over 2 slots of tp
    layout.coordinates(5)                                          pp 0, dp_replicate 1, dp_shard 0, cp 0, tp 1
    layout.group(5, ("dp_replicate", "dp_shard"))                  slots 1, 3, 5, 7: they have other samples
    layout.data_parallel_rank(5)                                   2 of 4, as slot 4: they run the same samples

The axes, from the outermost to the innermost; a slot's neighbours are those along the last one:

    pp             stages of layers
    dp_replicate   copies of the state; each has samples of its own
    dp_shard       shards of a copy (FSDP2); each has samples of its own
    cp             parts of a sample's tokens; a copy is sharded over dp_shard and cp together
    tp             columns, rows or vocabulary of a weight

ep is no axis beside these. Where a layer has experts, the slots of dp_shard, cp and tp that differ in nothing else are
dealt out anew, to `expert_shard` and, inside, `ep`.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeVar

from ductile.core.layout.geometry.mesh import Mesh
from ductile.core.layout.geometry.stages import contiguous_stages

T = TypeVar("T")

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_PARALLEL = ("dp_replicate", "dp_shard")
"""Axes whose coordinates have samples of their own."""
FULLY_SHARDED = ("dp_shard", "cp")
"""Axes over which FSDP2 shards one copy of what tp and pp have left."""
EXPERTS = ("expert_shard", "ep")
"""Axes of a layer's experts, in the place of dp_shard, cp and tp."""


class RankShape(NamedTuple):
    """Sizes of the axes whose slots work together on the samples of one data-parallel rank. A tuple: it is an array in
    what a run writes down."""

    pp: int = 1
    cp: int = 1
    tp: int = 1


ONE_SLOT_RANK = RankShape()


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Sizes of a layout's axes; `ductile.core.layout.geometry.parallel_layout` says what each does."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def num_slots(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def num_data_parallel(self) -> int:
        """Data-parallel ranks: how many parts a batch has at a time."""
        return self.dp_replicate * self.dp_shard

    @property
    def rank_shape(self) -> RankShape:
        """The slots that work on one data-parallel rank's samples."""
        return RankShape(self.pp, self.cp, self.tp)


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """A mesh of slots, and the stage of each layer. Equal layouts put the same numbers on the same slots.

    Raises ValueError for a layout that cannot be; the text has all that is wrong with it.
    """

    slots: tuple[int, ...]
    """The slots in rank order: the last axis, tp, runs fastest."""
    dims: ParallelDims
    stages: tuple[int, ...] = ()
    """Stage (coordinate along pp) of each layer, as the planner has them. Empty, as without pp: stages have equally
    many layers that follow each other; `stages_of` says which."""

    def __post_init__(self) -> None:
        if found := list(_violations(self.slots, self.dims, self.stages)):
            raise ValueError("; ".join(found))

    @staticmethod
    def of(slots: Iterable[int], stages: tuple[int, ...] = (), **sizes: int) -> "ParallelLayout":
        """The layout of these slots with these sizes, as `ParallelDims` names them; `dp_shard` is what they leave."""
        slots, dims = tuple(slots), ParallelDims(**sizes)
        others = dims.pp * dims.dp_replicate * dims.cp * dims.tp
        return ParallelLayout(slots, replace(dims, dp_shard=max(1, len(slots) // max(1, others))), stages)

    def on(self, slots: Iterable[int], **sizes: int) -> "ParallelLayout":
        """The layout of these slots with the same sizes, but for those given; `dp_shard` is what they leave."""
        return ParallelLayout.of(slots, self.stages, **(asdict(self.dims) | sizes))

    @property
    def mesh(self) -> Mesh:
        return _mesh(tuple((axis, getattr(self.dims, axis)) for axis in AXES), self.slots)

    @property
    def expert_mesh(self) -> Mesh:
        """The same slots as a layer's experts lie on them."""
        dims = self.dims
        shards = dims.dp_shard * dims.cp * dims.tp // dims.ep
        axes = (("pp", dims.pp), ("dp_replicate", dims.dp_replicate), ("expert_shard", shards), ("ep", dims.ep))
        return _mesh(axes, self.slots)

    def stages_of(self, num_layers: int) -> tuple[int, ...]:
        """Stage of each of so many layers. Raises ValueError where the layout has stages of another number of them."""
        stages = self.stages or contiguous_stages(num_layers, self.dims.pp)
        if len(stages) != num_layers:
            raise ValueError(f"stages {stages} do not place {num_layers} layers on {self.dims.pp} stages")
        return stages

    def coordinates(self, slot: int) -> dict[str, int]:
        """The slot's place along each axis."""
        return {axis: self.mesh.coordinate(slot, (axis,)) for axis in AXES}

    def group(self, slot: int, axes: Collection[str]) -> tuple[int, ...]:
        """The slots that differ from `slot` along these axes alone, itself among them, in rank order. Raises ValueError
        for axes that are not of one mesh: that of `AXES`, or that of `EXPERTS`."""
        mesh = self.mesh if set(EXPERTS).isdisjoint(axes) else self.expert_mesh
        ordered = [axis for axis, _ in mesh.axes if axis in axes]
        if strange := set(axes).difference(ordered):
            have = ", ".join(axis for axis, _ in mesh.axes)
            raise ValueError(f"{', '.join(sorted(strange))}: no axis of this mesh, which has {have}")
        return mesh.around(slot, ordered).slots

    @property
    def first(self) -> int:
        """Slot of rank 0. It speaks for all: its report is the trainer's, and it publishes and exports the weights."""
        return self.slots[0]

    @property
    def num_shards(self) -> int:
        """Parts of one copy of the state, each on another slot."""
        return len(self.slots) // self.dims.dp_replicate

    @property
    def num_data_parallel(self) -> int:
        """Data-parallel ranks: how many parts a batch has at a time."""
        return self.dims.num_data_parallel

    def data_parallel_rank(self, slot: int) -> int:
        """The part of a batch that the slot works on."""
        return self.mesh.coordinate(slot, DATA_PARALLEL)

    def counts_samples(self, slot: int) -> bool:
        """Whether the slot's sums over samples count. Of slots that have the same samples one's do: the first along cp
        and tp, in the last stage, which has the loss."""
        at = self.coordinates(slot)
        return at["cp"] == at["tp"] == 0 and at["pp"] == self.dims.pp - 1

    def deal(self, parts: Sequence[T]) -> dict[int, T]:
        """Each slot's part of a batch that has one for each data-parallel rank."""
        return {slot: parts[self.data_parallel_rank(slot)] for slot in self.slots}


@dataclass(frozen=True, slots=True)
class ResizeOrder:
    """A resize of the trainer, as the orchestrator decided it. Every slot of both layouts gets the same one."""

    epoch: int
    """Membership epoch that the change begins. The number of a failed change is not used again."""
    before: ParallelLayout
    after: ParallelLayout

    @property
    def slots(self) -> tuple[int, ...]:
        """All slots that take part, in ascending order."""
        return tuple(sorted({*self.before.slots, *self.after.slots}))

    @property
    def joiners(self) -> tuple[int, ...]:
        return tuple(slot for slot in self.after.slots if slot not in self.before.slots)

    @property
    def leavers(self) -> tuple[int, ...]:
        return tuple(slot for slot in self.before.slots if slot not in self.after.slots)


@lru_cache(maxsize=64)
def _mesh(axes: tuple[tuple[str, int], ...], slots: tuple[int, ...]) -> Mesh:
    """The same mesh each time: it remembers the coordinates, which are asked for at every micro-step."""
    return Mesh(axes, slots)


def _violations(slots: Sequence[int], dims: ParallelDims, stages: Sequence[int]) -> Iterator[str]:
    """Everything that is wrong with a layout, a sentence each."""
    if not slots:
        yield "a layout needs at least one slot"
    if twice := sorted(slot for slot, times in Counter(slots).items() if times > 1):
        yield f"a layout has each of its slots once, and {', '.join(map(str, twice))} several times"
    sizes = asdict(dims)
    small = [f"{axis} is {size} and must be at least 1" for axis, size in sizes.items() if size < 1]
    yield from small
    if small or not slots:
        return
    others = {axis: sizes[axis] for axis in AXES if axis != "dp_shard" and sizes[axis] > 1}
    num_blocks, left_over = divmod(len(slots), prod(others.values()))
    if left_over:
        product = " · ".join(f"{axis} {size}" for axis, size in others.items())
        yield f"the number of slots, {len(slots)}, must be a multiple of {product}"
    elif num_blocks != dims.dp_shard:
        yield f"dp_shard is {dims.dp_shard} and must be {num_blocks}, as the number of slots is {len(slots)}"
    around = dims.dp_shard * dims.cp * dims.tp
    if around % dims.ep:
        yield f"ep is {dims.ep} and must divide dp_shard · cp · tp, which is {around}"
    if stages and {*stages} != {*range(dims.pp)}:
        yield f"the layers are on stages {sorted({*stages})} and must be on all of 0 to {dims.pp - 1}"


ONE_SLOT = ParallelLayout.of((0,))
"""The layout of a trainer on slot 0 alone."""
