"""The norm against its formula."""

import pytest
import torch
from torch import Tensor

from ductile.model.norm import rms_norm

EPS = 1e-3


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (50, 16), (50, 3, 16)])
def test_equals_the_formula_and_its_gradients(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    x = (torch.randn(shape) * 10 ** torch.linspace(-3, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))).to(dtype)
    weight, upstream = torch.randn(16).to(dtype), torch.randn(shape).to(dtype)
    inputs = [tensor.requires_grad_() for tensor in (x, weight)]
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    ours, expected = rms_norm(x, weight, EPS), plain(*exact)
    gradients = torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(expected, exact, upstream.double())
    assert torch.equal(rms_norm(x.detach(), weight.detach(), EPS), ours)  # where no gradient is wanted
    for got, true in zip((ours, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert got.dtype == dtype
        atol = tolerance * float(true.detach().abs().max()) if true.numel() else 0.0
        torch.testing.assert_close(got.double(), true, atol=atol, rtol=tolerance)


def test_the_layout_of_what_comes_in_does_not_matter() -> None:
    """Part of a wider tensor comes in, and a transposed gradient comes back: the model's attention does both."""
    whole, weight = torch.randn(5, 4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    upstream = torch.randn(2, 5, 16).transpose(0, 1)
    ours, expected = rms_norm(whole[:, 1:3], weight, EPS), plain(whole[:, 1:3], weight)
    torch.testing.assert_close(ours, expected)
    gradients = (torch.autograd.grad(outputs, (whole, weight), upstream) for outputs in (ours, expected))
    torch.testing.assert_close(*gradients)


def test_finite_differences_agree() -> None:
    inputs = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3, 2, 8), (8,)))
    torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, EPS), tuple(inputs))
