"""Products of 8 bits: their scales, their rounding, and their gradients, by the arithmetic that a GPU does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ductile.kernels.float8 import LEAST_SCALE, MOST, linear, quantized, why_unavailable


def rounded(rows: torch.Tensor) -> torch.Tensor:
    codes, scales = quantized(rows)
    return codes.float() * scales


@given(st.integers(0, 2**31), st.integers(1, 5), st.floats(-30, 30))
def test_a_number_is_rounded_to_three_bits_of_its_rows_scale(seed: int, num_rows: int, magnitude: float) -> None:
    drawn = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(seed))
    rows = drawn * torch.logspace(0, magnitude, num_rows)[:, None]
    codes, scales = quantized(rows)
    assert scales.shape == (num_rows, 1)
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5)), "powers of two"
    largest = codes.float().abs().amax(dim=1)
    assert ((largest > MOST / 2.1) & (largest <= MOST)).all()
    error = (rounded(rows) - rows).abs()
    assert (error <= torch.maximum(rows.abs() / 16, scales * 2.0**-10)).all()


@pytest.mark.parametrize("value", [0.0, 1e-44, 448.0, 449.0, 3e38, -1.0])
def test_rows_of_one_number_stay(value: float) -> None:
    rows = torch.full((2, 16), value)
    codes, scales = quantized(rows)
    assert codes.float().isfinite().all()
    assert (scales >= LEAST_SCALE).all()
    assert (rounded(rows) - rows).abs().max() <= max(abs(value) / 16, LEAST_SCALE)


def test_a_product_and_its_gradients_are_those_of_the_rounded_factors() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*shape, generator=generator) for shape in ((7, 32), (48, 32), (7, 48)))
    bias = torch.randn(48, generator=generator)
    x[3] *= 1e4  # a token's scale is its own
    inputs = [each.requires_grad_() for each in (x, weight, bias)]
    out = linear(*inputs)
    torch.testing.assert_close(out, rounded(x) @ rounded(weight).t() + bias)
    by_x, by_weight, by_bias = torch.autograd.grad(out, inputs, grad)
    torch.testing.assert_close(by_x, rounded(grad) @ rounded(weight.t()).t())
    torch.testing.assert_close(by_weight, grad.t() @ x)
    torch.testing.assert_close(by_bias, grad.sum(0))
    exact = x @ weight.t() + bias
    assert ((out - exact).norm(dim=1) < 0.05 * exact.norm(dim=1)).all()


@pytest.mark.parametrize("rows", [torch.randn(32, 48), torch.randn(48, 32).t()], ids=["rows", "columns"])
def test_codes_lie_as_a_gpu_multiplies_them(rows: torch.Tensor) -> None:
    codes, _ = quantized(rows)
    assert codes.is_contiguous(), "scaled_mm takes a left factor by rows, and a right one by columns"


def test_a_weight_that_is_not_trained_has_no_gradient() -> None:
    x, weight = torch.randn(3, 16, dtype=torch.bfloat16, requires_grad=True), torch.randn(16, 16).bfloat16()
    out = linear(x, weight)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert weight.grad is None
    assert x.grad is not None


@pytest.mark.parametrize(
    ("dtype", "capability", "why"),
    [
        (torch.bfloat16, (8, 9), ""),
        (torch.bfloat16, (9, 0), ""),
        (torch.bfloat16, (8, 0), "capability 8.9 or later (Ada, Hopper, Blackwell), and this one has 8.0"),
        (torch.bfloat16, None, "it needs an NVIDIA GPU of compute capability 8.9 or later"),
        (torch.float32, (9, 0), 'it needs compute_dtype = "bfloat16", and this is float32'),
    ],
)
def test_what_is_missing_is_said(dtype: torch.dtype, capability: tuple[int, int] | None, why: str) -> None:
    found = why_unavailable(dtype, capability)
    assert why in found
    assert bool(found) == bool(why)
