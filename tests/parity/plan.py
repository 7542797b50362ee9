"""Which checks there are: every mesh with both models, and pairs of meshes that are drawn once and for all."""

import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

from tests.parity.checks import Check
from tests.parity.harness import ONE_SLOT
from tests.parity.knobs import KNOBS, can_have, combinations, with_knobs
from tests.parity.meshes import INTERLEAVED, MESHES, RESIZES, RING, ULYSSES, ZERO_BUBBLE, Pair, mesh, pairs
from tests.parity.model import MODELS

T = TypeVar("T")

SEED = 18
OF_THE_SUITE = (
    mesh(dp_shard=3),
    mesh(dp_replicate=2, dp_shard=2),
    mesh(tp=3),
    mesh(tp=4),
    mesh(ZERO_BUBBLE, pp=2, stages=INTERLEAVED),
    mesh(RING, cp=3),
    mesh(ULYSSES, cp=4),
    mesh(RING, pp=2, cp=2, tp=2, stages=(0, 0, 0, 1)),
)
"""A mesh or two of each axis, and one of several."""
NUM_RESIZES, NUM_CHECKPOINTS = 96, 20
STREAMING_EVERY = 3
NUM_COMBINATIONS = 20
MESHES_OF_KNOBS = (
    mesh(dp_shard=2, tp=2),
    mesh(pp=2, dp_shard=2),
    mesh(RING, cp=2, tp=2),
    mesh(ULYSSES, dp_shard=2, cp=2),
    mesh(dp_replicate=2, dp_shard=2),
    mesh(RING, pp=2, cp=2),
    mesh(dp_shard=2, tp=2),
    mesh(pp=2, stages=INTERLEAVED),
    mesh(dp_replicate=2, dp_shard=2),
    mesh(dp_shard=3),
    mesh(ULYSSES, dp_shard=2, cp=2),
    mesh(dp_shard=2, tp=2),
    mesh(RING, cp=2, tp=2),
    mesh(pp=2, tp=2),
)
"""Mesh on which each of `KNOBS` is shown alone, in their order."""


def mesh_checks() -> list[Check]:
    return [Check("mesh", (case,), model) for case in MESHES for model in MODELS]


def resize_checks() -> list[Check]:
    """What a run is most likely to do, and each mesh at least once as the first and once as the second."""
    drawn = dict.fromkeys((*RESIZES, *pairs(MESHES, rounds=2, seed=SEED)))
    return [
        Check("resize" if index % STREAMING_EVERY else "streaming resize", pair, model)
        for index, (pair, model) in enumerate(_with_model(list(drawn)[:NUM_RESIZES]))
    ]


def checkpoint_checks() -> list[Check]:
    drawn = sampled(pairs(MESHES, rounds=1, seed=SEED + 1), NUM_CHECKPOINTS)
    return [Check("checkpoint", pair, model) for pair, model in _with_model(drawn)]


def knob_checks() -> list[Check]:
    """Return each knob on one slot and on a mesh, combinations on meshes, and a resize with each knob."""
    alone = [with_knobs(case, name) for name, at in zip(KNOBS, MESHES_OF_KNOBS, strict=True) for case in (ONE_SLOT, at)]
    cases = [*alone, *combinations(NUM_COMBINATIONS, SEED)]
    shown = [Check("knob", (case,), MODELS[index % len(MODELS)]) for index, case in enumerate(cases)]
    fitting = [case for case in MESHES if all(can_have(case, [name]) for name in KNOBS)]
    resized = zip(KNOBS, sampled(pairs(fitting, rounds=1, seed=SEED + 2), len(KNOBS)), strict=True)
    return shown + [
        Check(
            "resize" if index % STREAMING_EVERY else "streaming resize",
            (with_knobs(first, name), with_knobs(second, name)),
            MODELS[index % len(MODELS)],
        )
        for index, (name, (first, second)) in enumerate(resized)
    ]


def mesh_checks_of_the_suite() -> list[Check]:
    """Return some of the meshes, each with one model."""
    assert set(OF_THE_SUITE) <= set(MESHES)
    return [Check("mesh", (case,), MODELS[index % len(MODELS)]) for index, case in enumerate(OF_THE_SUITE)]


def sampled(choices: Sequence[T], number: int) -> list[T]:
    """So many of them, always the same ones, in their order."""
    chosen = set(random.Random(SEED).sample(range(len(choices)), number))
    return [choice for index, choice in enumerate(choices) if index in chosen]


def _with_model(pairs: Iterable[Pair]) -> list[tuple[Pair, str]]:
    return [(pair, MODELS[index % len(MODELS)]) for index, pair in enumerate(pairs)]
