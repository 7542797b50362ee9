"""Packed attention against softmax with a T x T mask, written out."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ductile.model.attention import PackedAttention


def dumb(lengths: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All pairs at once: a token sees itself and what precedes it in its own document."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    sees = (document[:, None] == document[None, :]) & torch.ones(len(q), len(q), dtype=torch.bool).tril()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=0, max_size=8),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    seed=st.integers(0, 1000),
)
def test_equals_its_dumb_twin_forward_and_backward(lengths: list[int], heads: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(num_heads: int) -> Tensor:
        return torch.randn(sum(lengths), num_heads, 8, generator=generator).requires_grad_()

    inputs = q, k, v = draw(heads[0]), draw(heads[1]), draw(heads[1])
    ours, expected = PackedAttention(lengths)(0, q, k, v), dumb(lengths, q, k, v)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(ours.shape, generator=generator)
    if sum(lengths):
        gradients = torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)
        for gradient, expected_gradient in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-5)
