"""Each element of a tensor has one owner among those that hold it."""

from collections.abc import Callable

import numpy as np
import pytest

from ductile.core.layout.geometry.holdings import Box, volume
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.strategy import model_layout
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.transfer import owners
from ductile.core.transfer.cells import Atoms, atoms
from ductile.core.transfer.owners import owned_boxes, shared_boxes

SPEC = ModelSpec("qwen3", 31, 16, 24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, qk_norm=True)
TIED = ModelSpec("llama", 30, 16, 24, num_layers=3, num_heads=6, num_kv_heads=3, head_dim=4, tie_embeddings=True)


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["qwen3", "tied llama"])
@pytest.mark.parametrize(
    "axes",
    [
        {"dp_shard": 1},
        {"dp_replicate": 2, "dp_shard": 3},
        {"dp_shard": 2, "tp": 4},
        {"pp": 2, "tp": 3},
        {"pp": 3, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("boxes_of", [owned_boxes, shared_boxes])
def test_every_element_has_one_owner_who_holds_it(
    spec: ModelSpec,
    axes: dict[str, int],
    boxes_of: Callable[[Atoms, int, int], list[Box]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owners, "LEAST_SHARED", 40)
    parallel = ParallelLayout.of(range(3, 3 + np.prod([*axes.values()])), **axes)
    for turn, tensor in enumerate(model_layout(spec, parallel)):
        num_owners = np.zeros(tensor.shape, np.int64)
        for slot in parallel.slots:
            for box in boxes_of(atoms(tensor.holdings), slot, turn):
                num_owners[tuple(map(slice, *box))] += 1
                tensor.holdings.view(slot, box)  # raises where the slot does not hold all of it
        assert (num_owners == 1).all(), tensor.name


def test_copies_of_a_state_own_about_equally_many_tensors() -> None:
    layout = model_layout(SPEC, ParallelLayout.of(range(8), dp_replicate=4, dp_shard=2))
    num_owned = {
        slot: sum(bool(owned_boxes(atoms(tensor.holdings), slot, turn)) for turn, tensor in enumerate(layout))
        for slot in range(8)
    }
    # Of 27 tensors in 2 shards; a few have three components, which are dealt out for themselves.
    assert min(num_owned.values()) >= 6
    assert max(num_owned.values()) <= 9


@pytest.mark.parametrize("axes", [{"dp_replicate": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 2}], ids=str)
def test_slots_that_hold_the_same_send_equally_much(axes: dict[str, int]) -> None:
    spec = ModelSpec("qwen2", 20_000, 896, 4864, 3, 14, 2, 64, tie_embeddings=True, attention_bias=True)
    layout = model_layout(spec, ParallelLayout.of(range(np.prod([*axes.values()])), **axes))
    sizes = [
        sum(
            volume(box)
            for turn, tensor in enumerate(layout)
            for box in shared_boxes(atoms(tensor.holdings), slot, turn)
        )
        for slot in layout.slots
    ]
    assert max(sizes) < 1.01 * min(sizes)
