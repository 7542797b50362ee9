"""Heads of a tp slot, against a count of who reads what; and the parts of all weights that follow from them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.geometry.attention_heads import Heads, heads_on, share_key_heads
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.strategy import model_layout, tensor_parallel_shapes
from ductile.core.layout.model.parameters import parameters
from ductile.core.layout.model.spec import ModelSpec

SPEC = ModelSpec("qwen3", 50, 6, 24, num_layers=1, num_heads=8, num_kv_heads=2, head_dim=4, qk_norm=True)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    num_kv_heads, each = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return replace(
        SPEC,
        num_heads=num_kv_heads * each,
        num_kv_heads=num_kv_heads,
        vocab_size=draw(st.integers(1, 20)),
        intermediate_size=draw(st.integers(1, 9)),
        tie_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
    )


sizes = st.integers(1, 6)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "keys", "readers"),
    [
        (8, 2, 2, [range(0, 1), range(1, 2)], [(4,), (4,)]),
        (8, 2, 4, [range(0, 1), range(0, 1), range(1, 2), range(1, 2)], [(2,)] * 4),
        (8, 2, 3, [range(0, 1), range(0, 2), range(1, 2)], [(3,), (1, 2), (2,)]),
        (3, 1, 2, [range(0, 1), range(0, 1)], [(2,), (1,)]),
        (2, 2, 4, [range(0, 1), range(1, 2), range(0), range(0)], [(1,), (1,), (), ()]),
    ],
)
def test_key_heads_go_with_the_queries_that_read_them(
    num_heads: int, num_kv_heads: int, size: int, keys: list[range], readers: list[tuple[int, ...]]
) -> None:
    spec = replace(SPEC, num_heads=num_heads, num_kv_heads=num_kv_heads)
    heads = [heads_on(spec, size, coordinate) for coordinate in range(size)]
    assert [each.keys for each in heads] == keys
    assert [each.readers for each in heads] == readers
    assert [query for each in heads for query in each.queries] == [*range(num_heads)]


@pytest.mark.parametrize(("num_kv_heads", "shared"), [(1, {2, 3, 4}), (2, {3, 4}), (4, {3}), (8, set())])
def test_which_sizes_have_a_key_head_on_several_slots(num_kv_heads: int, shared: set[int]) -> None:
    spec = replace(SPEC, num_kv_heads=num_kv_heads)
    assert {size for size in range(1, 5) if share_key_heads(spec, size)} == shared


@given(specs(), sizes)
def test_every_query_finds_its_key_on_its_slot(spec: ModelSpec, size: int) -> None:
    num_held = dict.fromkeys(range(spec.num_kv_heads), 0)
    for coordinate in range(size):
        heads = heads_on(spec, size, coordinate)
        read = [query * spec.num_kv_heads // spec.num_heads for query in heads.queries]
        assert [key for key, times in zip(heads.keys, heads.readers, strict=True) for _ in range(times)] == read
        assert 0 not in heads.readers
        for key in heads.keys:
            num_held[key] += 1
    assert share_key_heads(spec, size) == any(times > 1 for times in num_held.values())


@given(specs(), sizes)
def test_the_parts_of_a_slot_lie_as_its_modules_take_them(spec: ModelSpec, size: int) -> None:
    """The dumb twin cuts each weight by hand."""
    parallel = ParallelLayout.of(range(size), tp=size)
    layout = model_layout(spec, parallel)
    for coordinate in parallel.slots:
        shapes = tensor_parallel_shapes(spec, parallel, coordinate)
        for parameter in parameters(spec):
            whole = np.arange(np.prod(parameter.shape)).reshape(parameter.shape)
            expected = cut(spec, parameter.name, whole, size, coordinate)
            assert shapes[parameter.name] == expected.shape
            local = np.full(layout.buffer_sizes(coordinate)[parameter.name][1], -1)
            for start, stop, offset, strides, _ in layout[parameter.name].holdings.rows_of(coordinate):
                box = whole[tuple(map(slice, start, stop))]
                at = offset + sum(
                    np.ix_(*(np.arange(n) * stride for n, stride in zip(box.shape, strides, strict=True)))
                )
                local[at] = box
            np.testing.assert_array_equal(local.reshape(expected.shape), expected)


def cut(spec: ModelSpec, name: str, whole: np.ndarray, size: int, coordinate: int) -> np.ndarray:
    """A slot's part of a weight; rows that are padding have -1."""

    def chunk(of: np.ndarray, axis: int = 0) -> np.ndarray:
        length = -(-of.shape[axis] // size)
        return np.take(of, range(*slice(coordinate * length, (coordinate + 1) * length).indices(of.shape[axis])), axis)

    def rows(of: np.ndarray, heads: range) -> np.ndarray:
        return of[heads.start * spec.head_dim : heads.stop * spec.head_dim]

    heads: Heads = heads_on(spec, size, coordinate)
    if "qkv_proj" in name:
        query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        q, k, v = np.split(whole, [query, query + key])
        return np.concatenate([rows(q, heads.queries), rows(k, heads.keys), rows(v, heads.keys)])
    if "gate_up_proj" in name:
        gate, up = np.split(whole, 2)
        return np.concatenate([chunk(gate), chunk(up)])
    if name.endswith("o_proj.weight"):
        return rows(whole.T, heads.queries).T
    if name.endswith("down_proj.weight"):
        return chunk(whole, axis=1)
    if name in ("embed.weight", "lm_head.weight"):
        padding = np.full((-len(whole) % size, whole.shape[1]), -1)
        return chunk(np.concatenate([whole, padding]))
    return whole
