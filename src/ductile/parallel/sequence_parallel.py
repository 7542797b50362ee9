"""Sequence parallelism: between its products, each tp slot has a part of the tokens; in them, all tokens and a part of
the weights. What travels between the two, with its counterpart on the way back:

| forward | backward | where |
|---|---|---|
| `gather`: all slots' tokens | add up, keep the own tokens | before a column-parallel product |
| `reduce_scatter`: add up, keep the own tokens | all slots' gradients | after a row-parallel product |
| `sum_gradients`: nothing | add up | weights that several slots have, and each uses for its tokens or heads |

T tokens, S = T / R of them on each of R slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ductile.parallel.exchange import DirectAllGather, DirectReduceScatter


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of a weight that may be on several slots of a group."""

    num_rows: int
    """How many different ones all slots together have."""
    places: tuple[tuple[slice, slice], ...]
    """(rows of the slot's part, which they are of `num_rows`) for those that the slot has."""

    def spread(self, gradient: Tensor) -> Tensor:
        """The rows where they are among all of them, with zeros for those that the slot has not: so all slots can add
        up, and those that have the same need no group of their own."""
        among_all = gradient.new_zeros(self.num_rows, *gradient.shape[1:])
        for here, there in self.places:
            among_all[there] = gradient[here]
        return among_all

    def put_back(self, among_all: Tensor, gradient: Tensor) -> Tensor:
        """The gradient with these rows in it."""
        gradient = gradient.clone()
        for here, there in self.places:
            gradient[here] = among_all[there]
        return gradient


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[S, ...] of each slot -> [T, ...]."""
    return _Gather.apply(x, group)  # pyright: ignore


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Addends [T, ...] of a sum -> the slot's part of the sum [S, ...]."""
    return _ReduceScatter.apply(x, group)  # pyright: ignore


def sum_gradients(
    group: dist.ProcessGroup, weights: Sequence[Tensor], shared: Sequence[SharedRows | None]
) -> tuple[Tensor, ...]:
    """The weights; what they get as gradients is summed over the slots that have the same, in fp32 and all at once.
    `shared` says which rows of each weight others have too; None: all slots have all of it."""
    return _SumGradients.apply(group, shared, *weights)  # pyright: ignore


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
    def forward(
        ctx: Any, group: dist.ProcessGroup, shared: Sequence[SharedRows | None], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.shared = group, shared
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pairs = list(zip(gradients, ctx.shared, strict=True))
        addends = [gradient if shared is None else shared.spread(gradient) for gradient, shared in pairs]
        total = torch.cat([addend.flatten().float() for addend in addends])
        dist.all_reduce(total, group=ctx.group)
        totals = total.split([addend.numel() for addend in addends])
        sums = [part.view(addend.shape).to(addend.dtype) for part, addend in zip(totals, addends, strict=True)]
        return (
            None,
            None,
            *(
                whole if shared is None else shared.put_back(whole, gradient)
                for whole, (gradient, shared) in zip(sums, pairs, strict=True)
            ),
        )
