"""Layouts of whole models: what each slot holds, and that together they hold everything."""

from dataclasses import replace

import numpy as np
import pytest

from ductile.core.layout.geometry import strategy
from ductile.core.layout.geometry.layout import Layout
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.stages import contiguous_stages
from ductile.core.layout.geometry.strategy import model_layout, tensor_parallel
from ductile.core.layout.model.parameters import parameters
from ductile.core.layout.model.spec import ModelSpec
from tests.core.other_layouts import relabelled, zero_layout

SPEC = ModelSpec("qwen3", 50, 16, 24, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=4, qk_norm=True)
TIED = ModelSpec("llama", 50, 16, 24, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=4, tie_embeddings=True)


def times_held(layout: Layout, name: str) -> np.ndarray:
    held = np.zeros(layout[name].shape, dtype=int)
    for slot in layout.slots:
        for start, stop, *_ in layout[name].holdings.rows_of(slot):
            held[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] += 1
    return held


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "axes",
    [
        {"dp_shard": 3},
        {"dp_replicate": 2, "dp_shard": 2},
        {"tp": 2, "pp": 3},
        {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2},
        {"dp_shard": 7, "tp": 4},
    ],
    ids=str,
)
def test_every_element_is_held_by_every_replica(spec: ModelSpec, axes: dict[str, int]) -> None:
    parallel = ParallelLayout.of(range(int(np.prod(list(axes.values())))), **axes)
    layout, mesh = model_layout(spec, parallel), parallel.mesh
    replicated_over_tp = ("norm.weight", "_norm.weight")
    for tensor in layout:
        held = times_held(layout, tensor.name)
        copies = mesh.size(("dp_replicate",))
        if tensor.name.endswith(replicated_over_tp):
            copies *= mesh.size(("tp",))
        if spec.tie_embeddings and tensor.name == "embed.weight" and mesh.size(("pp",)) > 1:
            copies *= 2
        if "qkv" in tensor.name and mesh.size(("tp",)) == 4:
            assert set(np.unique(held[:16])) == {copies}
            assert set(np.unique(held[16:])) == {2 * copies}, "two slots share a key head"
        else:
            assert set(np.unique(held)) == {copies}, tensor.name
    assert sum(tensor.num_bytes for tensor in layout) == 2 * spec.num_parameters


def test_tensor_parallel_cuts_what_megatron_cuts() -> None:
    layout = model_layout(SPEC, ParallelLayout.of(range(2), tp=2))
    shapes = {
        name.removeprefix("layers.0."): dict(((slot, size) for slot, _, size in tensor.holdings.sizes))[1]
        for name, tensor in layout.tensors.items()
        if not name.startswith(("layers.1", "layers.2", "layers.3", "layers.4"))
    }
    assert shapes == {
        "embed.weight": 25 * 16,
        "attention_norm.weight": 16,
        "attention.qkv_proj.weight": (8 + 4 + 4) * 16,
        "attention.q_norm.weight": 4,
        "attention.k_norm.weight": 4,
        "attention.o_proj.weight": 16 * 8,
        "mlp_norm.weight": 16,
        "mlp.gate_up_proj.weight": 24 * 16,
        "mlp.down_proj.weight": 16 * 12,
        "norm.weight": 16,
        "lm_head.weight": 25 * 16,
    }


def test_stages_follow_the_layers() -> None:
    assert contiguous_stages(5, 2) == (0, 0, 0, 1, 1)
    layout = model_layout(SPEC, ParallelLayout.of(range(2), (0, 1, 0, 1, 0), pp=2))
    holders = {name: tensor.holdings.slots.tolist() for name, tensor in layout.tensors.items()}
    assert [holders[f"layers.{layer}.mlp_norm.weight"] for layer in range(5)] == [[0], [1], [0], [1], [0]]
    assert (holders["embed.weight"], holders["lm_head.weight"], holders["norm.weight"]) == ([0], [1], [1])
    with pytest.raises(ValueError, match="do not place 5 layers on 2 stages"):
        model_layout(SPEC, ParallelLayout.of(range(2), (0, 1, 1, 0), pp=2))


def test_a_parameter_whose_place_nothing_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a router or a gate would be that somebody adds to the model."""
    known = parameters(SPEC)
    for name, says in (("router.weight", "how tp cuts router"), ("layers.0.mlp.gate.weight", "how tp cuts layers.0")):
        strange = replace(known[1], name=name)
        monkeypatch.setattr(strategy, "parameters", lambda spec, strange=strange: (*known, strange))
        with pytest.raises(ValueError, match=says):
            model_layout(SPEC, ParallelLayout.of(range(2)))
    splits = tensor_parallel(SPEC, 50)
    monkeypatch.setattr(strategy, "parameters", lambda spec: (replace(known[1], name="router.weight"),))
    monkeypatch.setattr(strategy, "tensor_parallel", lambda spec, rows: splits | {"router.weight": None})
    with pytest.raises(ValueError, match="which stage has router"):
        model_layout(SPEC, ParallelLayout.of(range(2), pp=2))


def test_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="ep is 2, and where experts lie is not built yet"):
        model_layout(SPEC, ParallelLayout.of(range(2), ep=2))


def test_tied_embeddings_are_one_tensor_on_the_first_and_the_last_stage() -> None:
    layout = model_layout(TIED, ParallelLayout.of(range(3), pp=3))
    assert layout["embed.weight"].holdings.slots.tolist() == [0, 2]
    assert "lm_head.weight" not in layout.tensors


def test_the_vocabulary_is_padded_to_equal_shards() -> None:
    layout = model_layout(SPEC, ParallelLayout.of(range(4), tp=4), vocab_multiple=8)
    assert [size for _, _, size in layout["embed.weight"].holdings.sizes] == [16 * 16] * 4
    assert set(np.unique(times_held(layout, "embed.weight"))) == {1}


def test_zero_state_is_one_buffer_of_equal_ranges() -> None:
    parallel = ParallelLayout.of(range(6), dp_replicate=3, tp=2)
    params, mesh = model_layout(SPEC, parallel), parallel.mesh
    state = zero_layout(params, mesh).kind("exp_avg.", "float32")
    assert list(state.tensors) == ["exp_avg." + name for name in params.tensors]
    sizes = [state.buffer_sizes(slot) for slot in mesh.slots]
    assert len({tuple(size.items()) for size in sizes}) == 1
    assert set(sizes[0]) == {"exp_avg.zero"}
    assert sizes[0]["exp_avg.zero"][0] == "float32"
    assert set(np.unique(times_held(state, "exp_avg.layers.0.mlp.down_proj.weight"))) == {1}


def test_the_key_is_the_content() -> None:
    one = model_layout(SPEC, ParallelLayout.of(range(4), dp_replicate=2, tp=2))
    assert one.key == model_layout(SPEC, ParallelLayout.of(range(4), dp_replicate=2, tp=2)).key
    others = [
        model_layout(SPEC, ParallelLayout.of((0, 1, 3, 2), dp_replicate=2, tp=2)),
        model_layout(SPEC, ParallelLayout.of(range(4), dp_shard=2, tp=2)),
        model_layout(SPEC, ParallelLayout.of(range(4, 8), dp_replicate=2, tp=2)),
        model_layout(SPEC, ParallelLayout.of(range(4), dp_replicate=2, tp=2), dtype="float32"),
        model_layout(TIED, ParallelLayout.of(range(4), dp_replicate=2, tp=2)),
    ]
    assert len({one.key, *(layout.key for layout in others)}) == 1 + len(others)


def test_layouts_can_be_joined_and_moved() -> None:
    parallel = ParallelLayout.of(range(2), dp_replicate=2)
    params = model_layout(SPEC, parallel)
    both = params | zero_layout(params, parallel.mesh).kind("master.", "float32")
    assert len(both.tensors) == 2 * len(params.tensors)
    with pytest.raises(ValueError, match=r"'embed\.weight' is in both"):
        params | params
    moved = relabelled(both, {0: 9, 1: 3})
    assert moved.slots == (3, 9)
    name = "master.embed.weight"
    assert moved[name].holdings.rows_of(9) == both[name].holdings.rows_of(0)
    with pytest.raises(ValueError, match="two places to one slot"):
        relabelled(both, {0: 1, 1: 1})
