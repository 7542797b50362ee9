"""Products of matrices by oneDNN against torch's own, on any processor."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from ductile.kernels import dispatch, products
from ductile.kernels.dispatch import linear
from ductile.kernels.products import BLOCKS
from ductile.model.linear import Linear
from tests.ranks import run_alone

K, M = 64, 2048
"""With these, 16 rows are enough for oneDNN."""
RAGGED = [16, 17, 47, 64, 130, 1024 + 512 + 7]
"""Numbers of rows: a block, a block and some, several."""


@pytest.fixture(params=[True, False], ids=["oneDNN", "torch's own"])
def by_onednn(request, monkeypatch):
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(dispatch, "onednn_is_faster", lambda: request.param)
    return request.param


@pytest.mark.parametrize("num_rows", RAGGED)
@pytest.mark.parametrize(("with_bias", "by_columns"), [(True, False), (False, True)])
def test_equals_the_product_and_its_gradients_in_fp64(by_onednn, num_rows, with_bias, by_columns):
    layer = Linear(K, M, bias=with_bias)
    x = torch.randn(num_rows, K, requires_grad=True)
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


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_whatever_wants_a_gradient_alone_gets_it(by_onednn, wanted):
    """Of a sum, whose gradient is one number in memory."""
    inputs = {"x": torch.randn(100, K), "weight": torch.randn(M, K), "bias": torch.randn(M)}
    inputs[wanted].requires_grad_()
    linear(**inputs).sum().backward()
    right = {
        "x": inputs["weight"].detach().sum(0).expand(100, K),
        "weight": inputs["x"].detach().sum(0).expand(M, K),
        "bias": torch.full((M,), 100.0),
    }
    torch.testing.assert_close(inputs[wanted].grad, right[wanted], atol=1e-2, rtol=0)


@pytest.mark.parametrize("num_rows", RAGGED)
def test_without_a_gradient_and_with_one_the_bits_are_the_same(by_onednn, num_rows):
    """What a scorer and a trainer say of the same tokens."""
    x, weight = torch.randn(num_rows, K), torch.randn(M, K, requires_grad=True)
    with_gradient = linear(x, weight)
    with torch.no_grad():
        assert torch.equal(linear(x, weight), with_gradient)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((100, K), torch.bfloat16), ((100, K), torch.float64), ((4, 100, K), torch.float32), ((1, K), torch.float32)],
)
def test_other_formats_and_shapes_are_torch_s_own(by_onednn, shape, dtype):
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(M, K, dtype=dtype, requires_grad=True)
    ours = linear(x, weight)
    assert torch.equal(ours, F.linear(x, weight))
    ours.sum().backward()
    assert weight.grad is not None


def test_blocks_are_all_rows_but_the_last_few():
    for num_rows in range(3000):
        blocks = list(products._blocks_of(num_rows))
        starts, ends = [0, *(block.stop for block in blocks)], [block.stop - block.start for block in blocks]
        assert [block.start for block in blocks] == starts[:-1]
        assert {*ends} <= {*BLOCKS}
        assert 0 <= num_rows - starts[-1] < BLOCKS[-1]


def _resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def _run_many_sizes() -> float:
    """MiB that the process has grown by while it multiplied 150 numbers of rows."""
    dispatch.onednn_is_faster = lambda: True
    weight = torch.randn(M, K, requires_grad=True)
    linear(torch.randn(1000, K), weight).sum().backward()
    before = _resident_mib()
    for num_rows in range(400, 1000, 4):
        linear(torch.randn(num_rows, K, requires_grad=True), weight).sum().backward()
    return _resident_mib() - before


def test_a_number_of_rows_that_is_new_takes_no_memory_for_good():
    """oneDNN keeps a kernel for each shape: without blocks these would take some 250 MiB."""
    assert run_alone(_run_many_sizes) < 60
