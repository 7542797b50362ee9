"""Packed attention on a CPU: torch's fused kernel, once for a document, and once for all branches of one length.

A document that shares nothing sees itself, causally. A branch of a tree sees its stem as well: the stem's keys are put
before its own, and a mask says which of those are behind a query. The backward pass is one piece: it puts gradients
where they belong, where autograd would have a dozen nodes for each call, whose gradients are cut and joined again.

T tokens, N sequences of a run, S tokens of each, P tokens of their stem, H query heads, K key/value heads, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ductile.kernels.equal_sequences import EqualSequences, equal_sequences
from ductile.kernels.trees import Tree

KEY_ROWS = 1 << 14
"""Most rows of keys that are put together for one call: 16 MiB for 4 heads of 64 in fp32."""
MASK_ELEMENTS = 1 << 22
"""Most elements of a mask: 16 MiB in fp32. Of longer branches some queries are run at a time."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the kernel: queries of sequences of one length, and the stem that they all see besides
    themselves."""

    run: EqualSequences
    stem: slice
    """Rows of the stem; none for sequences that have none."""
    first: int
    last: int
    """The queries from `first` to `last` are run, of each sequence."""

    @property
    def num_stem(self) -> int:
        return self.stem.stop - self.stem.start

    def queries(self, x: Tensor) -> Tensor:
        """[T, H, D] -> [N, H, last - first, D], in the same memory."""
        return self.run.heads_first(x)[:, :, self.first : self.last]

    def own_keys(self, x: Tensor) -> Tensor:
        """[T, K, D] -> [N, K, last, D], in the same memory."""
        return self.run.heads_first(x)[:, :, : self.last]

    def keys(self, x: Tensor) -> Tensor:
        """[T, K, D] -> [N, K, P + last, D]: in the same memory where there is no stem."""
        own = self.own_keys(x)
        if not self.num_stem:
            return own
        return torch.cat((x[self.stem].transpose(0, 1).expand(self.run.num, -1, -1, -1), own), dim=2)

    def sight(self, x: Tensor) -> dict[str, Any]:
        """What tells the kernel which keys a query sees."""
        if not self.num_stem:
            return {"is_causal": True}
        beyond = x.new_full((self.last - self.first, self.num_stem + self.last), -torch.inf)
        return {"is_causal": False, "attn_mask": beyond.triu_(self.num_stem + self.first + 1)}


def calls(trees: Sequence[Tree]) -> Iterator[Call]:
    for tree in trees:
        stem = slice(tree.start, tree.stem)
        for run in equal_sequences([stem.stop - stem.start], stem.start):
            yield Call(run, slice(0, 0), 0, run.length)
        for run in equal_sequences([end - start for start, end in tree.branches], tree.stem):
            yield from _of_branches(run, stem)


def _of_branches(run: EqualSequences, stem: slice) -> Iterator[Call]:
    num_keys = run.length + stem.stop - stem.start
    num_together = max(1, KEY_ROWS // num_keys)
    num_queries = max(1, min(run.length, MASK_ELEMENTS // num_keys)) if stem.stop > stem.start else run.length
    for sequence in range(0, run.num, num_together):
        num = min(num_together, run.num - sequence)
        start = run.start + sequence * run.length
        for first in range(0, run.length, num_queries):
            last = min(first + num_queries, run.length)
            yield Call(EqualSequences(start, start + num * run.length, num), stem, first, last)


def readable(x: Tensor) -> Tensor:
    """[..., D] as the kernel reads it: the numbers of a head one after the other, whatever the strides say."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor, calls: Sequence[Call]) -> Tensor:
    """q [T, H, D], k and v [T, K, D] -> [T, H, D]."""
    return _FusedAttention.apply(q, k, v, calls)  # pyright: ignore


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: Sequence[Call]) -> Tensor:
        q, k, v = map(readable, (q, k, v))
        out = q.new_empty(q.shape)
        lses: list[Tensor] = []
        for call in calls:
            inputs = call.queries(q), call.keys(k), call.keys(v)
            of_call, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs, **call.sight(q))
            call.queries(out).copy_(of_call)
            lses.append(lse)
        ctx.save_for_backward(q, k, v, out, *lses)
        ctx.calls = calls
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, *lses = ctx.saved_tensors
        grad = grad.contiguous()  # what comes from a sum has one number in memory
        # Every row is among the queries of one call, and among the keys of one or several.
        grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        for call, lse in zip(ctx.calls, lses, strict=True):
            inputs = call.queries(grad), call.queries(q), call.keys(k), call.keys(v)
            of_q, *of_keys = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *inputs, call.queries(out), lse, 0.0, **call.sight(q)
            )
            call.queries(grad_q).copy_(of_q)
            for total, part in zip((grad_k, grad_v), of_keys, strict=True):
                of_stem, own = part.tensor_split([call.num_stem], dim=2)
                call.own_keys(total).add_(own)
                if call.num_stem:
                    total[call.stem].transpose(0, 1).add_(of_stem.sum(0))
        return grad_q, grad_k, grad_v, None
