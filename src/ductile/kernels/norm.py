"""Root-mean-square normalisation, alone and after an addition to the residual stream.

torch has a kernel for its gradient on CUDA. On a CPU it has none, and autograd walks a chain of small steps, each
through memory: the same by hand takes a third of the time. N rows, D the last dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ductile.kernels.blocks import blocks
from ductile.kernels.plain import wide_type


def add_norm(x: Tensor, change: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Both are one function, as the backward pass then adds what comes through the norm and what comes past it in one
    block."""
    return _AddNorm.apply(x, change, weight, eps)  # pyright: ignore


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        total = x if change is None else torch.empty_like(out)
        scale = x.new_empty((*x.shape[:-1], 1), dtype=wide_type(x))
        for x_block, total_block, out_block, scale_block, *changes in blocks(x, total, out, scale, *_there(change)):
            for change_block in changes:
                torch.add(x_block, change_block, out=total_block)
            # The order of torch's own, so that a scorer, which wants no gradient, gets the same bits.
            wide = total_block.to(scale.dtype)
            torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps), out=scale_block)
            torch.mul(wide * scale_block, weight, out=out_block)
        ctx.save_for_backward(total, weight, scale)
        ctx.set_materialize_grads(False)
        ctx.with_change = change is not None
        return total, out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_total: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        if grad is None:
            return grad_total, grad_total if ctx.with_change else None, None, None
        wide_weight = weight.to(scale.dtype)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_weight = torch.zeros_like(wide_weight) if ctx.needs_input_grad[2] else None
        in_rows = (x, grad, scale, grad_x, *_there(grad_total))
        for x_block, grad_block, scale_block, out_block, *past in blocks(*in_rows):
            wide = x_block.to(scale.dtype)
            product = (grad_block * wide).reshape(-1, len(weight))
            if grad_weight is not None:
                grad_weight += scale_block.reshape(-1) @ product
            # scale depends on every x of its row: d scale / d x = -scale^3 x / D
            pull = (product @ wide_weight).view(scale_block.shape).mul_(scale_block**3).div_(-len(weight))
            through = (grad_block * wide_weight).mul_(scale_block)
            for past_block in past:
                through += past_block
            torch.addcmul(through, wide, pull, out=out_block)
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_x, grad_x if ctx.with_change else None, of_weight, None


def _there(tensor: Tensor | None) -> tuple[Tensor, ...]:
    return () if tensor is None else (tensor,)
