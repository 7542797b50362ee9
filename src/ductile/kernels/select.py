"""Picking indices of a tensor's dim, some of them several times: one stem's keys for each of its branches, one key head
for each slot that needs it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ductile.kernels.plain import wide_type


def select(x: Tensor, dim: int, indices: Tensor) -> Tensor:
    """`x.index_select(dim, indices)`. Gradients are added up in fp32 or more: an index may come dozens of times."""
    return _Select.apply(x, dim, indices)  # pyright: ignore


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.dim, ctx.shape = dim, x.shape
        return x.index_select(dim, indices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.shape, dtype=wide_type(grad))
        return total.index_add_(ctx.dim, indices, grad.to(total.dtype)).to(grad.dtype), None, None
