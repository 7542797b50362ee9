"""Ulysses: for attention each slot along cp has all tokens and its part of the heads.

One exchange brings the queries, keys and values of a part of the heads together, one brings the outputs back; the
backward pass has the same two, the other way round. Attention in between is that of a single slot, branches and all.
With fewer key heads than slots, or a number that does not divide, slots share key heads, whose gradients add up.

Slots have tokens as cards are dealt out, token 0 to slot 0, token 1 to slot 1: exchanged, they lie side by side.

T tokens, H query heads, K key/value heads, h = H / cp, k key/value heads of a slot, D head size.
"""

from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ductile.kernels.select import select
from ductile.model.attention import Attend


class UlyssesAttention:
    """Attention that keeps to `attend`, which sees all tokens and a part of the heads."""

    def __init__(self, attend: Attend, group: dist.ProcessGroup) -> None:
        self._attend = attend
        self._group = group
        self._key_heads: Tensor | None = None
        """The key heads that slots get, slot by slot; None until the first layer has come."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T / cp, H, D], k and v [T / cp, K, D] -> [T / cp, H, D]. Collective."""
        cp = self._group.size()
        if self._key_heads is None:
            self._key_heads = torch.tensor(key_heads(q.shape[1], k.shape[1], cp), device=k.device)
        if len(self._key_heads) > k.shape[1]:
            k, v = select(k, 1, self._key_heads), select(v, 1, self._key_heads)
        per_slot = [x.unflatten(1, (cp, -1)) for x in (q, k, v)]
        sizes = [x.shape[2] for x in per_slot]
        qkv = _all_to_all(torch.cat(per_slot, dim=2).transpose(0, 1), self._group)  # [cp, T / cp, h + 2 k, D]
        out = self._attend(layer, *qkv.transpose(0, 1).flatten(0, 1).split(sizes, dim=1))
        parts = _all_to_all(out.unflatten(0, (-1, cp)).transpose(0, 1), self._group)  # [cp, T / cp, h, D]
        return parts.transpose(0, 1).flatten(1, 2)


def key_heads(num_heads: int, num_kv_heads: int, cp: int) -> list[int]:
    """The key heads that the slots' query heads need, slot by slot, equally many for each; query heads of a slot that
    follow each other share one of them, equally many for each.

        key_heads(8, 4, 2)    0 1, 2 3
        key_heads(8, 2, 4)    0, 0, 1, 1
        key_heads(12, 3, 2)   0 0 1, 1 2 2    as query heads 4 and 5 of the first slot need key head 1
    """
    shared = gcd(num_heads // cp, num_heads // num_kv_heads)
    return [head * num_kv_heads // num_heads for head in range(0, num_heads, shared)]


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """parts [cp, ...], one for each slot -> what each slot had for this one [cp, ...]."""
    return _AllToAll.apply(parts, group)  # pyright: ignore


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None  # pyright: ignore
