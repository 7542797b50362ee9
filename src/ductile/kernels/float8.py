"""Linear layers whose products have factors of 8 bits (e4m3), with a scale for each row or column.

| product | factors of 8 bits | scales |
|---|---|---|
| y = x W^T | x and W | a token's, an output's |
| dx = dy W | dy and W | a token's, an input's |
| dW = dy^T x | none, as its sum goes over tokens: it stays in the dtype of x | |

A scale goes along what the product does not sum over, so it is taken out of the sum, and is a power of two, so that
dividing by it rounds nothing. The rest is rounded to 3 bits behind the leading one, each time anew: parameters and what
the optimizer keeps have their own dtypes.

On a GPU it is torch's `scaled_mm`; elsewhere the same arithmetic in fp32, for tests. N rows, K columns, M outputs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ductile.kernels.varlen_attention import capability_of

CODES = torch.float8_e4m3fn
MOST = torch.finfo(CODES).max
"""The largest number that 8 bits have: 448."""
LEAST_SCALE = 2.0**-126
CAPABILITY = (8, 9)
"""Compute capability of the oldest devices that multiply such numbers."""
MULTIPLE = 16
"""What a product's inputs and outputs have to be a multiple of."""


def check(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError, a sentence, where a model that computes in `dtype` on the device cannot have such products."""
    if why := why_unavailable(dtype, capability_of(device)):
        raise ValueError(f"trainer.model.fp8 cannot be had on this slot: {why}. Write false, or leave it out.")


def why_unavailable(dtype: torch.dtype, capability: tuple[int, int] | None) -> str:
    """Return what keeps products of 8 bits from a model that computes in `dtype` on such a device; "" if nothing does.
    `capability` is None on a device that is not NVIDIA's."""
    needed = f"an NVIDIA GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or later (Ada, Hopper, Blackwell)"
    if capability is None:
        return f"it needs {needed}"
    if capability < CAPABILITY:
        return f"it needs {needed}, and this one has {capability[0]}.{capability[1]}"
    if dtype != torch.bfloat16:
        return f'it needs compute_dtype = "bfloat16", and this is {str(dtype).removeprefix("torch.")}'
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    return ""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K], weight [M, K], bias [M] -> x weight^T + bias, [N, M]; as `dispatch.linear`, but for the rounding."""
    out: Tensor = _Product.apply(x, weight)  # pyright: ignore
    return out if bias is None else out + bias


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> codes [N, K], contiguous, and scales [N, 1] fp32: codes * scales are the rows, rounded."""
    wide = rows.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    scales = torch.exp2(torch.ceil(torch.log2(largest / MOST))).clamp(min=LEAST_SCALE)
    codes = (wide / scales).clamp_(-MOST, MOST)
    return codes.to(CODES, memory_format=torch.contiguous_format), scales


def multiply(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Codes and scales of [N, K] and of [M, K] -> left right^T, [N, M]."""
    (codes, scales), (other_codes, other_scales) = left, right
    if codes.device.type != "cuda":
        return (codes.float() @ other_codes.float().t() * scales * other_scales.t()).to(dtype)
    by_row = F.ScalingType.RowWise
    return F.scaled_mm(codes, other_codes.t(), scales, by_row, other_scales.t(), by_row, output_dtype=dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        of_x, of_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return multiply(quantized(x), quantized(weight), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        grad_x = multiply(quantized(grad), quantized(weight.t()), grad.dtype) if wants_x else None
        return grad_x, grad.t() @ x if wants_weight else None
