"""The gated activation between the two projections of an MLP, over its fused input.

Its backward pass is written out: both halves go straight to where they belong. Autograd would make them apart and then
copy them together. T tokens, I intermediate size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from ductile.kernels.blocks import blocks


def swiglu(gate_up: Tensor) -> Tensor:
    if gate_up.requires_grad:
        return _SwiGLU.apply(gate_up)  # pyright: ignore
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for gate_block, up_block, out_block in blocks(gate, up, out):
            torch.ops.aten.silu.out(gate_block, out=out_block).mul_(up_block)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad_gate_up = torch.empty_like(gate_up)
        halves = (*gate_up.chunk(2, dim=-1), *grad_gate_up.chunk(2, dim=-1))
        for gate, up, grad_gate, grad_up, grad_block in blocks(*halves, grad):
            torch.mul(grad_block, silu(gate), out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad_block * up, gate, grad_input=grad_gate)
        return grad_gate_up
