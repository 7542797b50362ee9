"""Products of matrices by oneDNN against torch's own, on any processor."""

import pytest
import torch
from torch.nn import functional as F

from ductile.kernels import products
from ductile.kernels.products import SMALLEST, Linear, linear, product


@pytest.fixture(params=[True, False], ids=["oneDNN", "torch's own"])
def by_onednn(request, monkeypatch):
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "onednn_is_faster", lambda: request.param)
    return request.param


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("by_columns", [True, False])
def test_equals_the_product_and_its_gradients_in_fp64(by_onednn, with_bias, by_columns):
    layer = Linear(64, 256, bias=with_bias)
    x = torch.randn(SMALLEST // (64 * 256), 64, requires_grad=True)
    if by_columns:  # as a generator keeps them
        layer.weight.data = layer.weight.data.t().contiguous().t()
    inputs = [x, *layer.parameters()]
    wide = [each.detach().double().requires_grad_() for each in inputs]
    ours, expected = layer(x), F.linear(*wide)
    assert ("_Linear" in type(ours.grad_fn).__name__) == by_onednn
    torch.testing.assert_close(ours.double(), expected, atol=1e-4, rtol=0)
    upstream = torch.randn_like(ours)
    found = torch.autograd.grad(ours, inputs, upstream)
    for gradient, right in zip(found, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        torch.testing.assert_close(gradient.double(), right, atol=1e-3, rtol=0)


def test_a_gradient_that_is_one_number_in_memory(by_onednn):
    """What comes out of `sum` has strides of 0."""
    x, weight = torch.randn(SMALLEST // (64 * 256), 64), torch.randn(256, 64, requires_grad=True)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(256, 64), atol=1e-3, rtol=0)


def test_one_weight_alone_or_the_input_alone_wants_a_gradient(by_onednn):
    x, weight = torch.randn(SMALLEST // (64 * 256), 64), torch.randn(256, 64)
    linear(x.requires_grad_(), weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x), atol=1e-3, rtol=0)


def test_without_a_gradient_and_with_one_the_bits_are_the_same(by_onednn):
    """What a scorer and a trainer say of the same tokens."""
    x, weight = torch.randn(SMALLEST // (64 * 256), 64), torch.randn(256, 64, requires_grad=True)
    with_gradient = linear(x, weight)
    with torch.no_grad():
        assert torch.equal(linear(x, weight), with_gradient)
        assert torch.equal(product(x, weight), with_gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_formats_are_torch_s_own(by_onednn, dtype):
    x, weight = (torch.randn(rows, 64, dtype=dtype) for rows in (SMALLEST // (64 * 256), 256))
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert product(x, weight).dtype == dtype
