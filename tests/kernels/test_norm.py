"""The norm against its formula."""

import pytest
import torch
from torch import Tensor

from ductile.kernels.dispatch import add_norm, rms_norm

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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("used", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("with_change", [True, False])
def test_the_sum_and_its_norm_are_the_two_steps(
    with_change: bool, used: tuple[bool, bool], dtype: torch.dtype, tolerance: float
) -> None:
    shapes = [(700, 160)] * (1 + with_change) + [(160,)]
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    upstream = [torch.randn(700, 160).to(dtype) for _ in range(2)]
    change = inputs[1] if with_change else None
    total = exact[0] + exact[1] if with_change else exact[0]
    ours, expected = add_norm(inputs[0], change, inputs[-1], EPS), (total, plain(total, exact[-1]))

    def gradients(outputs: tuple[Tensor, Tensor], of: list[Tensor]) -> tuple[Tensor | None, ...]:
        chosen = [(out, up.to(out.dtype)) for out, up, is_used in zip(outputs, upstream, used, strict=True) if is_used]
        return torch.autograd.grad([out for out, _ in chosen], of, [up for _, up in chosen], allow_unused=True)

    pairs = zip((*ours, *gradients(ours, inputs)), (*expected, *gradients(expected, exact)), strict=True)
    for got, true in pairs:
        assert (got is None) == (true is None)
        if got is not None and true is not None:
            atol = tolerance * float(true.detach().abs().max())
            torch.testing.assert_close(got.double(), true, atol=atol, rtol=tolerance)
    with torch.no_grad():
        assert all(map(torch.equal, add_norm(inputs[0], change, inputs[-1], EPS), ours))
