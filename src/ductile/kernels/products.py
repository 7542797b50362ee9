"""Products of fp32 matrices on a CPU by oneDNN.

torch multiplies them with MKL, which uses half the width of an AMD processor's vectors; oneDNN, which torch brings too,
uses all of it and is 2.3 times as fast there.

oneDNN compiles a kernel for every shape, in half a millisecond, and keeps up to 1,024 of them, 0.7 MiB each; packed
batches have another number of rows each time. So rows are multiplied in blocks of a few sizes, and what is left over by
MKL.

N rows, K what is summed over, M outputs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

BLOCKS = (1024, 512, 256, 128, 64, 32, 16)
"""Numbers of rows for which there are kernels."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K], weight [M, K], bias [M], all in fp32 -> x weight^T + bias, [N, M]."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in (x, weight, bias) if each is not None):
        return _Linear.apply(x, weight, bias)  # pyright: ignore
    return _by_rows(x, weight, bias)


def _blocks_of(num_rows: int) -> Iterator[slice]:
    """Blocks of rows from the first one on; fewer rows than the smallest block has are left over."""
    start = 0
    for size in BLOCKS:
        while num_rows - start >= size:
            yield slice(start, start + size)
            start += size


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, a block of rows at a time."""
    if len(x) in BLOCKS:
        return _by_onednn(x, weight, bias)
    out = x.new_empty(len(x), len(weight))
    done = 0
    for rows in _blocks_of(len(x)):
        out[rows] = _by_onednn(x[rows], weight, bias)
        done = rows.stop
    if done < len(x):
        out[done:] = F.linear(x[done:], weight, bias)
    return out


def _over_rows(grad: Tensor, x: Tensor) -> Tensor:
    """grad [N, M], x [N, K] -> grad^T x [M, K], added up over blocks of rows."""
    out, done = None, 0
    for rows in _blocks_of(len(x)):
        part = _by_onednn(grad[rows].t(), x[rows].t())
        out = part if out is None else out.add_(part)
        done = rows.stop
    if out is None:
        return grad.t() @ x
    return out if done == len(x) else out.addmm_(grad[done:].t(), x[done:])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return _by_rows(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()  # what comes from a sum has one number in memory, which oneDNN does not take
        of_bias = ctx.needs_input_grad[2]
        return (
            None if weight is None else _by_rows(grad, weight.t()),
            None if x is None else _over_rows(grad, x),
            grad.sum(0) if of_bias else None,
        )
