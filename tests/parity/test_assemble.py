"""The twin puts together what was cut, and finds what is not as the layout says."""

from collections.abc import Callable

import numpy as np
import pytest

from ductile.core.layout.geometry.layout import Layout
from ductile.core.layout.model.parameters import parameters
from ductile.core.layout.model.spec import ModelSpec
from tests.parity.assemble import Array, WrongParts, assemble, differing, state_layout
from tests.parity.meshes import RING, MeshCase, mesh

SPEC = ModelSpec("llama", 30, 16, 24, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=4, tie_embeddings=True)
KINDS = ("model/", "gradient/")
CASES = (
    mesh(),
    mesh(dp_shard=3),
    mesh(dp_replicate=2, dp_shard=2),
    mesh(tp=4),
    mesh(RING, dp_shard=2, cp=2, tp=2),
    mesh(pp=2, tp=2, stages=(0, 1, 0, 1)),
)


def whole(seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {
        kind + parameter.name: random.standard_normal(parameter.shape).astype(np.float32)
        for kind in KINDS
        for parameter in parameters(SPEC)
    }


def cut(layout: Layout, tensors: dict[str, Array]) -> dict[int, dict[str, Array]]:
    """What each slot has, element by element; padding is -1."""
    held: dict[int, dict[str, Array]] = {slot: {} for slot in layout.slots}
    for slot, buffers in held.items():
        for name, (_, size) in layout.buffer_sizes(slot).items():
            buffers[name] = np.full(size, -1, np.float32)
            for start, stop, offset, strides, _ in layout[name].holdings.rows_of(slot):
                extent = [b - a for a, b in zip(start, stop, strict=True)]
                for place in np.ndindex(*extent):
                    at = offset + sum(index * stride for index, stride in zip(place, strides, strict=True))
                    buffers[name][at] = tensors[name][tuple(np.add(start, place))]
    return held


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_was_cut_is_whole_again(case: MeshCase) -> None:
    layout, tensors = state_layout(SPEC, case.layout, KINDS), whole(0)
    assert differing(assemble(layout, cut(layout, tensors)), tensors) == []


def nudge(held: dict[int, dict[str, Array]], slot: int) -> None:
    held[slot]["model/norm.weight"][0] += 1e-6


def lose_an_element(held: dict[int, dict[str, Array]], slot: int) -> None:
    held[slot]["model/norm.weight"] = held[slot]["model/norm.weight"][1:]


def lose_a_tensor(held: dict[int, dict[str, Array]], slot: int) -> None:
    del held[slot]["gradient/norm.weight"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (nudge, "have the same part of model/norm.weight, and differ in it"),
        (lose_an_element, "has 15 elements of model/norm.weight, and its layout says 16"),
        (lose_a_tensor, "has 0 elements of gradient/norm.weight, and its layout says 16"),
    ],
)
def test_what_is_wrong_is_found(change: Callable[[dict[int, dict[str, Array]], int], None], said: str) -> None:
    case = mesh(tp=4)
    layout = state_layout(SPEC, case.layout, KINDS)
    held = cut(layout, whole(0))
    change(held, case.layout.slots[2])
    with pytest.raises(WrongParts, match=said):
        assemble(layout, held)


def test_what_no_slot_has_is_found() -> None:
    half = state_layout(SPEC, mesh(dp_shard=2).layout, KINDS)
    held = cut(half, whole(0))
    missing = Layout([half["model/norm.weight"]], half.slots[:1])
    with pytest.raises(WrongParts, match="8 of 16 elements of model/norm"):
        assemble(missing, {half.slots[0]: {"model/norm.weight": held[half.slots[0]]["model/norm.weight"]}})


def test_one_bit_makes_a_difference() -> None:
    ours, theirs = whole(0), whole(0)
    theirs["model/norm.weight"][3] = np.nextafter(theirs["model/norm.weight"][3], np.float32(9))
    del theirs["gradient/norm.weight"]
    assert differing(ours, theirs) == ["gradient/norm.weight", "model/norm.weight"]
    zero, minus_zero = np.zeros(2, np.float32), -np.zeros(2, np.float32)
    assert differing({"zero": zero}, {"zero": minus_zero}) == ["zero"]
