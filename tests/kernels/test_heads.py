"""Heads split, normalised and turned in one piece, against the three steps one after the other."""

import pytest
import torch
from torch import Tensor

from ductile.kernels.dispatch import split_heads

EPS = 1e-3
HEADS = (4, 2, 2)
HEAD_DIM = 16


def plain(qkv: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor) -> list[Tensor]:
    q, k, v = qkv.unflatten(-1, (8, HEAD_DIM)).split(HEADS, dim=1)
    turned = []
    for x, of_heads in ((q, slice(0, 4)), (k, slice(4, 6))):
        if weight is not None:
            x = weight[of_heads] * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        first, second = x.chunk(2, dim=-1)
        partner = torch.cat((second, first), dim=-1)
        turned.append(x * cos + partner * sin)
    return [*turned, v]


def angles(num_tokens: int) -> tuple[Tensor, Tensor]:
    """cos and sin as `Rope` makes them."""
    half = torch.rand(num_tokens, 1, HEAD_DIM // 2) * 7
    return torch.cat((half.cos(), half.cos()), dim=-1), torch.cat((-half.sin(), half.sin()), dim=-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 1500])
def test_equals_the_three_steps_and_their_gradients(
    num_tokens: int, with_norm: bool, dtype: torch.dtype, tolerance: float
) -> None:
    qkv = torch.randn(num_tokens, 8 * HEAD_DIM).to(dtype).requires_grad_()
    weight = torch.rand(6, HEAD_DIM).to(dtype).requires_grad_() if with_norm else None
    upstream = [torch.randn(num_tokens, num, HEAD_DIM).to(dtype) for num in HEADS]
    inputs = [x for x in (qkv, weight) if x is not None]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    cos, sin = angles(num_tokens)
    ours = split_heads(qkv, HEADS, weight, EPS, cos, sin)
    expected = plain(exact[0], exact[1] if with_norm else None, cos.double(), sin.double())
    gradients = torch.autograd.grad(ours, inputs, upstream)
    expected_gradients = torch.autograd.grad(expected, exact, [x.double() for x in upstream])
    for got, true in zip((*ours, *gradients), (*expected, *expected_gradients), strict=True):
        assert got.dtype == dtype
        atol = tolerance * float(true.detach().abs().max()) if true.numel() else 0.0
        torch.testing.assert_close(got.double(), true, atol=atol, rtol=tolerance)
    with torch.no_grad():
        assert all(map(torch.equal, split_heads(qkv, HEADS, weight, EPS, cos, sin), ours))


def test_finite_differences_agree() -> None:
    cos, sin = angles(3)
    inputs = (torch.randn(3, 8 * HEAD_DIM, dtype=torch.float64), torch.rand(6, HEAD_DIM, dtype=torch.float64))
    torch.autograd.gradcheck(
        lambda qkv, weight: split_heads(qkv, HEADS, weight, EPS, cos.double(), sin.double()),
        [x.requires_grad_() for x in inputs],
    )


def test_bfloat16_turns_in_float32() -> None:
    qkv, (cos, sin) = torch.randn(3, 8 * HEAD_DIM).bfloat16(), angles(3)
    in_bfloat16, in_float32 = (split_heads(x, HEADS, None, EPS, cos, sin)[0] for x in (qkv, qkv.float()))
    assert in_bfloat16.dtype == torch.bfloat16
    assert torch.equal(in_bfloat16, in_float32.bfloat16())
