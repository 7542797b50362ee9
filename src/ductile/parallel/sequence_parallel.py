"""Sequence parallelism: between its products, each tp slot has a part of the tokens; in them, all tokens and a part of
the weights. What travels between the two, with its counterpart on the way back:

| forward | backward | where |
|---|---|---|
| `gather`: all slots' tokens | add up, keep the own tokens | before a column-parallel product |
| `reduce_scatter`: add up, keep the own tokens | all slots' gradients | after a row-parallel product |
| `sum_gradients`: nothing | add up | a weight that all slots have, and each uses for its tokens or heads |
| `sum_shared_rows`: nothing | add up what several slots have | key heads that several slots have |

T tokens, S = T / R of them on each of R slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ductile.parallel.compilation import outside_graphs
from ductile.parallel.fsdp_collectives import DirectAllGather, DirectReduceScatter


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of a weight that may be on several slots of a group."""

    num_rows: int
    """How many different ones all slots together have."""
    places: tuple[tuple[slice, slice], ...]
    """(rows of the slot's part, which they are of `num_rows`) for those that the slot has."""


@outside_graphs
def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[S, ...] of each slot -> [T, ...]."""
    return _Gather.apply(x, group)  # pyright: ignore


@outside_graphs
def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Addends [T, ...] of a sum -> the slot's part of the sum [S, ...]."""
    return _ReduceScatter.apply(x, group)  # pyright: ignore


@outside_graphs
def sum_gradients(group: dist.ProcessGroup, *weights: Tensor) -> tuple[Tensor, ...]:
    """The weights; what they get as gradients is summed over the group, in fp32 and all at once.

    They must be of one module: zero-bubble schedules make gradients of weights after those of inputs, module by module,
    and a function of all weights of a layer would join what they take apart."""
    return _SumGradients.apply(group, *weights)  # pyright: ignore


@outside_graphs
def sum_shared_rows(group: dist.ProcessGroup, shared: SharedRows, *weights: Tensor) -> tuple[Tensor, ...]:
    """The weights; what these of their rows get as gradients is summed over the slots that have them, in fp32."""
    return _SumSharedRows.apply(group, shared, *weights)  # pyright: ignore


def gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`gather`, without a gradient."""
    whole = part.new_empty((group.size() * len(part), *part.shape[1:]))
    if part.device.type == "cpu":
        DirectAllGather()(whole, part.contiguous(), group)
    else:
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def reduce_scattered(addends: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`reduce_scatter`, without a gradient."""
    part = addends.new_empty((len(addends) // group.size(), *addends.shape[1:]))
    if addends.device.type == "cpu":
        DirectReduceScatter()(part, addends.contiguous(), group, dist.ReduceOp.SUM)
    else:
        dist.reduce_scatter_tensor(part, addends.contiguous(), group=group)
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scattered(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scattered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.group), None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_summed(gradients, ctx.group)


class _SumSharedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, shared: SharedRows, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.shared = group, shared
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Over the whole group, with zeros for the rows that a slot has not: sharers need no groups of their own.
        shared: SharedRows = ctx.shared
        addends = [gradient.new_zeros(shared.num_rows, *gradient.shape[1:]) for gradient in gradients]
        for gradient, addend in zip(gradients, addends, strict=True):
            for own, among_all in shared.places:
                addend[among_all] = gradient[own]
        summed = [gradient.clone() for gradient in gradients]
        for gradient, total in zip(summed, _summed(addends, ctx.group), strict=True):
            for own, among_all in shared.places:
                gradient[own] = total[among_all]
        return None, None, *summed


def _summed(addends: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Sums over the group's slots, the same bits on each."""
    total = torch.cat([addend.flatten().float() for addend in addends])
    dist.all_reduce(total, group=group)
    parts = total.split([addend.numel() for addend in addends])
    return [part.view(addend.shape).to(addend.dtype) for part, addend in zip(parts, addends, strict=True)]
