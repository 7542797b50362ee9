"""Packed attention against softmax with a T x T mask, written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ductile.model import attention, cpu_attention
from ductile.model.attention import PackedAttention, Tree

Trees = list[tuple[int, list[int]]]
"""Lengths of each stem and of its branches."""


def sees(trees: Trees) -> Tensor:
    """[T, T]: a token sees itself and what precedes it in its own branch and in the stem."""
    num_tokens = sum(stem + sum(branches) for stem, branches in trees)
    seen = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    start = 0
    for stem, branches in trees:
        first = start
        for length in (stem, *branches):
            rows = slice(start, start + length)
            seen[rows, rows] = torch.ones(length, length, dtype=torch.bool).tril()
            if start > first:
                seen[rows, first : first + stem] = True
            start += length
    return seen


def dumb(trees: Trees, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All pairs at once."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~sees(trees), float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


lengths = st.integers(0, 40)
tree_lists = st.lists(
    st.tuples(lengths, st.one_of(st.just([]), st.lists(lengths, max_size=4), lengths.map(lambda n: [n] * 3))),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(
    trees=tree_lists,
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    tile_scores=st.sampled_from([1, 500, 20_000, cpu_attention.TILE_SCORES]),
    seed=st.integers(0, 1000),
)
def test_equals_its_dumb_twin_forward_and_backward(
    trees: Trees, heads: tuple[int, int], tile_scores: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(stem + sum(branches) for stem, branches in trees)

    def draw(num_heads: int) -> Tensor:
        return torch.randn(num_tokens, num_heads, 8, generator=generator).requires_grad_()

    inputs = q, k, v = draw(heads[0]), draw(heads[1]), draw(heads[1])
    attend = PackedAttention([stem for stem, _ in trees], [branches for _, branches in trees])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "TILE_SCORES", tile_scores)
        ours, expected = attend(0, q, k, v), dumb(trees, q, k, v)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(ours.shape, generator=generator)
    if num_tokens:
        gradients = torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)
        for gradient, expected_gradient in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_what_a_gpu_runs_equals_it_too(heads: tuple[int, int]) -> None:
    trees: Trees = [(5, [3, 1]), (4, [])]
    q, k, v = torch.randn(13, heads[0], 8), torch.randn(13, heads[1], 8), torch.randn(13, heads[1], 8)
    packed = (Tree(0, 5, (8, 9)), Tree(9, 13))
    ours = torch.cat([part for tree in packed for part in attention.by_document(tree, q, k, v)])
    torch.testing.assert_close(ours, dumb(trees, q, k, v), atol=1e-5, rtol=1e-5)


def test_bfloat16_is_as_near_to_float32_as_its_rounding() -> None:
    q, k, v = (torch.randn(50, 2, 16).bfloat16() for _ in range(3))
    ours = PackedAttention([50])(0, q, k, v)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), dumb([(50, [])], q.float(), k.float(), v.float()), atol=2e-2, rtol=2e-2)
