"""The gated activation against its formula."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from ductile.kernels.dispatch import swiglu


def plain(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_equals_the_formula_and_its_gradient_bit_for_bit(num_tokens: int, dtype: torch.dtype) -> None:
    gate_up = (4 * torch.randn(num_tokens, 64)).to(dtype).requires_grad_()
    upstream = torch.randn(num_tokens, 32).to(dtype)
    ours, expected = swiglu(gate_up), plain(gate_up)
    assert torch.equal(ours, expected)
    assert torch.equal(swiglu(gate_up.detach()), expected)  # where no gradient is wanted
    gradients = (torch.autograd.grad(outputs, gate_up, upstream)[0] for outputs in (ours, expected))
    assert torch.equal(*gradients)


def test_finite_differences_agree() -> None:
    torch.autograd.gradcheck(swiglu, torch.randn(3, 10, dtype=torch.float64, requires_grad=True))
