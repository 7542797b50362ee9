"""Ring attention: the slots along cp pass their keys and values around, and each looks at them as they come by.

Of each document's 2 cp chunks slot r has number r and number 2 cp - 1 - r: its front and its back. A chunk sees those
of a lower number, and itself causally. So each slot has two products of chunks to compute for the keys of any other
slot, and three for its own: the slots have equally much to do at all times.

What one slot's keys contribute is merged by the log-sum-exp, in fp32. In the backward pass keys and values come by once
more, and their gradients travel behind them, in fp32; each slot adds its part, and the last hop brings them home.
While one block is worked on, the next is on its way.

T tokens, H query heads, K key/value heads, D head size.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ductile.kernels.dispatch import partial_attention
from ductile.kernels.partial_attention import Merged, PartialAttention
from ductile.kernels.plain import wide_type

FRONT, BACK = 0, 1


class RingAttention:
    """Causal attention inside each document. A slot has its front chunks of all documents, then its back ones."""

    def __init__(self, chunk_lengths: Sequence[int], group: dist.ProcessGroup) -> None:
        """chunk_lengths: tokens of a chunk of each document."""
        self._lengths = chunk_lengths
        self._group = group
        self._partial: PartialAttention | None = None
        """How a chunk attends to another one in all layers; None until the first layer has chosen."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T / cp, H, D], k and v [T / cp, K, D] -> [T / cp, H, D]. Collective."""
        if self._partial is None:
            self._partial = partial_attention(self._lengths, q)
        return _Ring.apply(q, k, v, self._partial, self._group)  # pyright: ignore


def seen(rank: int, source: int, cp: int) -> list[tuple[int, int, bool]]:
    """Which of a slot's chunks (FRONT, BACK) see which of another slot's, and whether causally."""
    own, others = (rank, 2 * cp - 1 - rank), (source, 2 * cp - 1 - source)
    return [
        (query, key, own[query] == others[key])
        for query in (FRONT, BACK)
        for key in (FRONT, BACK)
        if own[query] >= others[key]
    ]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, partial: PartialAttention, group: dist.ProcessGroup
    ) -> Tensor:
        queries, merged = q.chunk(2), dict[int, Merged]()
        for source, block in _passing_by(torch.stack((k, v)), group):
            (keys, values) = (x.chunk(2) for x in block)
            for query, key, causal in seen(group.rank(), source, group.size()):
                out, lse = partial.attend(queries[query], keys[key], values[key], causal)
                if query in merged:
                    merged[query].add(out, lse)
                else:
                    merged[query] = Merged(out, lse)
        out = torch.cat([merged[query].out for query in (FRONT, BACK)]).to(q.dtype)
        lse = torch.cat([merged[query].lse for query in (FRONT, BACK)])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.partial, ctx.group = partial, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        partial, group = ctx.partial, ctx.group
        queries, grads, outs, lses = (x.chunk(2) for x in (q, grad, out, lse))
        of_q = torch.zeros_like(q, dtype=wide_type(q))
        on_its_way: _OnItsWay | None = None
        """Gradient of the block that is worked on, as far as the slots before have added to it."""
        for source, block in _passing_by(torch.stack((k, v)), group):
            (keys, values) = (x.chunk(2) for x in block)
            of_block = torch.zeros_like(block, dtype=wide_type(k))
            for query, key, causal in seen(group.rank(), source, group.size()):
                from_q, from_k, from_v = partial.gradients(
                    grads[query], queries[query], keys[key], values[key], outs[query], lses[query], causal
                )
                of_q.chunk(2)[query].add_(from_q)
                of_block[0].chunk(2)[key].add_(from_k)
                of_block[1].chunk(2)[key].add_(from_v)
            if on_its_way:
                of_block += on_its_way.arrived()
            on_its_way = _OnItsWay(of_block, group)
        assert on_its_way is not None, "a slot's own keys are the first that come by"
        of_k, of_v = on_its_way.arrived()
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None


def _passing_by(block: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Every slot's block once, and whose it is, this slot's first. The next one is on its way meanwhile."""
    cp, rank = group.size(), group.rank()
    for step in range(cp):
        on_its_way = _OnItsWay(block, group) if step < cp - 1 else None
        yield (rank - step) % cp, block
        if on_its_way:
            block = on_its_way.arrived()


class _OnItsWay:
    """A block that goes to the next slot, while one of the same shape comes from the slot before.

    It is an exchange among all, where most have nothing for each other: gloo has that for what lies on a GPU, too.
    """

    def __init__(self, block: Tensor, group: dist.ProcessGroup) -> None:
        self._leaving, self._coming = block, torch.empty_like(block)
        length, to, source = len(block), [0] * group.size(), [0] * group.size()
        to[(group.rank() + 1) % group.size()] = length
        source[(group.rank() - 1) % group.size()] = length
        self._work = dist.all_to_all_single(self._coming, block, source, to, group=group, async_op=True)

    def arrived(self) -> Tensor:
        assert self._work is not None, "this slot is in the group"
        self._work.wait()
        return self._coming
