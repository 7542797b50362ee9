"""The meshes that parity is shown on: every axis alone, and all of them mixed, over one to eight slots.

Models have four layers, eight query heads, and four or two heads of keys and values (`tests.parity.model`). So 4 and 8
slots of tp, or of cp in ulysses' style, are more than there are heads of keys and values; 3 and 5 divide nothing.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType

from ductile.core.layout.geometry.parallel_layout import ParallelLayout

NUM_SLOTS = 8
"""Slots that there are. A mesh lies on some of them, in an order of its own: coordinates are no slot numbers."""
NUM_LAYERS = 4


@dataclass(frozen=True)
class MeshCase:
    """A mesh without its slots, and what the configuration says beside it."""

    axes: tuple[tuple[str, int], ...]
    stages: tuple[int, ...] = ()
    """Stage of each layer; empty: the default."""
    settings: tuple[tuple[str, str], ...] = ()
    """Keys of [trainer.model] that say how the axes do their work, such as cp_style, and their values."""

    @property
    def name(self) -> str:
        axes = ",".join(f"{axis}={size}" for axis, size in self.axes) or "one slot"
        stages = ["stages=" + "".join(map(str, self.stages))] if self.stages else []
        return " ".join([axes, *stages, *(f"{key}={value}" for key, value in self.settings)])

    @property
    def num_slots(self) -> int:
        return prod(size for _, size in self.axes)

    @cached_property
    def layout(self) -> ParallelLayout:
        slots = random.Random(self.name).sample(range(NUM_SLOTS), self.num_slots)
        return ParallelLayout.of(slots, self.stages, **dict(self.axes))

    def goes_with(self, other: "MeshCase") -> bool:
        """Whether a trainer can be resized from one to the other: settings are the run's, which stay."""
        ours, theirs = dict(self.settings), dict(other.settings)
        return all(ours[key] == theirs[key] for key in ours.keys() & theirs.keys())


def mesh(settings: Mapping[str, str] = MappingProxyType({}), stages: tuple[int, ...] = (), **axes: int) -> MeshCase:
    return MeshCase(tuple(axes.items()), stages, tuple(settings.items()))


RING, ULYSSES = {"cp_style": "ring"}, {"cp_style": "ulysses"}
AUTO = {"cp_style": "auto"}
"""The default: ulysses with 2 slots of cp, and ring with 3, among which 8 heads cannot be dealt."""
ZERO_BUBBLE = {"pp_schedule": "zero_bubble"}
ONCE_A_STEP = {"reduce_every": "step"}
INTERLEAVED = (0, 1, 0, 1)
"""Stages of the layers, each of which has two runs of them."""

MESHES = (
    mesh(),
    # shards and copies
    mesh(dp_shard=2),
    mesh(dp_shard=3),
    mesh(dp_shard=5),
    mesh(dp_shard=7),
    mesh(dp_shard=8),
    mesh(dp_replicate=2),
    mesh(dp_replicate=2, dp_shard=2),
    mesh(dp_replicate=3, dp_shard=2),
    mesh(dp_replicate=2, dp_shard=4),
    mesh(ONCE_A_STEP, dp_replicate=2, dp_shard=2),
    # tp
    mesh(tp=2),
    mesh(tp=3),
    mesh(tp=4),
    mesh(tp=8),
    mesh(dp_shard=2, tp=2),
    mesh(dp_shard=3, tp=2),
    mesh(dp_shard=2, tp=3),
    mesh(dp_replicate=2, tp=2),
    mesh(dp_shard=2, tp=4),
    mesh(dp_replicate=2, dp_shard=2, tp=2),
    # pp
    mesh(pp=2),
    mesh(pp=3),
    mesh(pp=4),
    mesh(pp=2, stages=(0, 0, 0, 1)),
    mesh(pp=3, stages=(0, 1, 1, 2)),
    mesh(pp=2, stages=INTERLEAVED),
    mesh(ZERO_BUBBLE, pp=2, stages=INTERLEAVED),
    mesh(ZERO_BUBBLE, pp=4),
    mesh(pp=2, dp_shard=2),
    mesh(ONCE_A_STEP, pp=2, dp_shard=2),
    mesh(pp=2, dp_replicate=2),
    mesh(pp=2, dp_shard=3, stages=(0, 1, 1, 1)),
    mesh(pp=4, dp_shard=2),
    mesh(pp=2, dp_replicate=2, dp_shard=2, stages=INTERLEAVED),
    # cp
    mesh(RING, cp=2),
    mesh(ULYSSES, cp=2),
    mesh(RING, cp=3),
    mesh(RING, cp=4),
    mesh(ULYSSES, cp=4),
    mesh(RING, cp=8),
    mesh(ULYSSES, cp=8),
    mesh(RING, dp_shard=2, cp=2),
    mesh(ULYSSES, dp_shard=2, cp=2),
    mesh(RING, dp_replicate=2, cp=2),
    mesh(ULYSSES, dp_shard=2, cp=4),
    mesh(ULYSSES, dp_replicate=2, dp_shard=2, cp=2),
    mesh(AUTO, cp=2),
    mesh(AUTO, dp_shard=2, cp=3),
    # two and more of tp, pp and cp
    mesh(RING, cp=2, tp=2),
    mesh(ULYSSES, cp=2, tp=2),
    mesh(RING, cp=2, tp=3),
    mesh(RING, cp=4, tp=2),
    mesh(ULYSSES, cp=2, tp=4),
    mesh(RING, dp_shard=2, cp=2, tp=2),
    mesh(ULYSSES, dp_replicate=2, cp=2, tp=2),
    mesh(ULYSSES | ONCE_A_STEP, dp_shard=2, cp=2, tp=2),
    mesh(pp=2, tp=2),
    mesh(pp=2, tp=4),
    mesh(pp=4, tp=2),
    mesh(pp=2, dp_shard=2, tp=2),
    mesh(ZERO_BUBBLE, pp=2, dp_shard=2, tp=2),
    mesh(pp=3, tp=2, stages=(0, 0, 1, 2)),
    mesh(pp=2, dp_replicate=2, tp=2, stages=INTERLEAVED),
    mesh(RING, pp=2, cp=2),
    mesh(ULYSSES, pp=2, cp=2, stages=INTERLEAVED),
    mesh(RING, pp=2, dp_shard=2, cp=2),
    mesh(ULYSSES, pp=2, dp_replicate=2, cp=2),
    mesh(RING, pp=2, cp=2, tp=2, stages=(0, 0, 0, 1)),
    mesh(ULYSSES, pp=2, cp=2, tp=2),
)

Pair = tuple[MeshCase, MeshCase]
RESIZES = (
    (mesh(tp=2), mesh(tp=4)),
    (mesh(dp_shard=4), mesh(pp=2, tp=2)),
    (mesh(dp_shard=2), mesh(RING, dp_shard=2, cp=2)),
    (mesh(dp_shard=2), mesh(ULYSSES, dp_shard=2, cp=2)),
    (mesh(AUTO, cp=2), mesh(AUTO, dp_shard=2, cp=3)),
    (mesh(AUTO, dp_shard=2, cp=3), mesh(AUTO, cp=2)),
    (mesh(pp=2), mesh(dp_shard=2)),
    (mesh(pp=2), mesh(pp=2, stages=INTERLEAVED)),
    (mesh(dp_shard=2), mesh(dp_shard=8)),
    (mesh(dp_shard=8), mesh()),
)
"""Pairs that are always among those that are resized."""


def pairs(meshes: Sequence[MeshCase], rounds: int, seed: int) -> list[Pair]:
    """Ordered pairs in which each mesh is `rounds` times the first and `rounds` times the second."""
    chance = random.Random(seed)
    found: dict[Pair, None] = {}
    for _ in range(rounds):
        found |= dict.fromkeys(_one_round(meshes, found, chance))
    return list(found)


def _one_round(meshes: Sequence[MeshCase], taken: dict[Pair, None], chance: random.Random) -> list[Pair]:
    while True:  # dealt out at random, the last ones may be left with nothing that goes with them: then once more
        left, matched = list(meshes), list[Pair]()
        for first in chance.sample(meshes, len(meshes)):
            fitting = [second for second in left if _fits(first, second, taken)]
            if fitting:
                matched.append((first, chance.choice(fitting)))
                left.remove(matched[-1][1])
        if not left:
            return matched


def _fits(first: MeshCase, second: MeshCase, taken: dict[Pair, None]) -> bool:
    return first != second and first.goes_with(second) and (first, second) not in taken
