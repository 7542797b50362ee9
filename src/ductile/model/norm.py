"""Root-mean-square normalisation. N rows, D the last dim."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> weight * x / sqrt(mean(x^2) + eps), the mean over D. In fp32 or more, then as x is.

    torch has a kernel for its gradient on CUDA. On a CPU it has none, and autograd walks a chain of small steps, each
    through memory: the same by hand takes a third of the time.
    """
    if x.device.type == "cpu" and x.requires_grad:
        return _RMSNorm.apply(x, weight, eps)  # pyright: ignore
    return F.rms_norm(x, weight.shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        # The order of torch's own, so that a scorer, which wants no gradient, gets the same bits.
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide, wide_weight = _wide(x), _wide(weight)
        product = torch.mul(grad, wide, out=wide.new_empty(wide.shape))
        rows = product.view(-1, x.shape[-1])
        grad_weight = scale.reshape(-1) @ rows
        # scale depends on every x of its row: d scale / d x = -scale^3 x / D
        pull = (rows @ wide_weight).view(scale.shape).mul_(scale**3).div_(-x.shape[-1])
        grad_x = torch.mul(grad, wide_weight, out=product).mul_(scale).addcmul_(wide, pull)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def _wide(x: Tensor) -> Tensor:
    """The type to add up in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
