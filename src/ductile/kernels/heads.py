"""What one projection becomes before attention: queries and keys normalised (Qwen3) and turned by their position.

As separate steps that is a dozen passes over memory, and autograd cuts and joins the projection's gradient. Here
queries and keys take them together, a block of rows at a time, and gradients go straight to where they belong.

T tokens, H query heads, K key/value heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ductile.kernels.blocks import blocks
from ductile.kernels.plain import rotate, wide_type


def split_heads(
    qkv: Tensor, heads: tuple[int, int, int], weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x = qkv.view(-1, sum(heads), cos.shape[-1])
    if x.requires_grad:
        return _SplitHeads.apply(x, heads, weight, eps, cos, sin)  # pyright: ignore
    return _forward(x, heads, weight, eps, cos, sin)[:3]


def _forward(
    x: Tensor, heads: tuple[int, int, int], weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [T, H + 2 K, D] -> q, k and v, and by what queries and keys were multiplied, [T, H + K, 1]."""
    qk, v = x.split((heads[0] + heads[1], heads[2]), dim=1)
    turned = x.new_empty(qk.shape)
    scale = x.new_empty((*qk.shape[:2], 1), dtype=wide_type(x))
    for qk_block, turned_block, scale_block, *angles in blocks(qk, turned, scale, cos, sin):
        wide = qk_block.to(scale.dtype)
        if weight is not None:
            torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps), out=scale_block)
            wide = (wide * scale_block).mul_(weight)
        rotate(wide, *angles, out=turned_block)
    q, k = turned.split(heads[:2], dim=1)
    return q, k, v, scale


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, heads: tuple[int, int, int], weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, scale = _forward(x, heads, weight, eps, cos, sin)
        ctx.save_for_backward(x, weight, scale, cos, sin)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple[Tensor, None, Tensor | None, None, None, None]:
        x, weight, scale, cos, sin = ctx.saved_tensors
        num_turned = scale.shape[1]
        grad = x.new_empty(x.shape)
        grad_weight = None if weight is None else torch.zeros_like(weight, dtype=scale.dtype)
        # The way back turns by the opposite angle.
        in_rows = (x[:, :num_turned], grad, scale, cos, -sin, grad_q, grad_k, grad_v)
        for x_block, grad_block, scale_block, cos_block, sin_block, *of_heads in blocks(*in_rows):
            to_turned, to_v = grad_block.tensor_split([num_turned], dim=1)
            to_v.copy_(of_heads[2])
            straight = rotate(torch.cat(of_heads[:2], dim=1).to(scale.dtype), cos_block, sin_block)
            if weight is None or grad_weight is None:
                to_turned.copy_(straight)
                continue
            normed = x_block * scale_block
            product = straight * normed
            grad_weight += product.sum(0)
            # scale depends on every coordinate of its head: d scale / d x = -scale^2 normed / D
            pull = product.mul_(weight).mean(-1, keepdim=True)
            torch.mul(straight.mul_(weight).addcmul_(normed, pull, value=-1), scale_block, out=to_turned)
        return grad, None, None if grad_weight is None else grad_weight.to(x.dtype), None, None, None
