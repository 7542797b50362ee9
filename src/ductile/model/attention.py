"""Attention over documents packed one after the other, without leak from one to the next.

T tokens, H query heads, K key/value heads, D head size.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ductile.kernels import cpu_attention, varlen_attention
from ductile.kernels.trees import Tree


class Attend(Protocol):
    """The seam between the model and what keeps keys and values: a packed batch here, a paged cache elsewhere."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, K, D], after norms and rotation -> [T, H, D]."""
        ...


class PackedAttention:
    """Causal attention inside each document of `lengths`.

    Where documents begin alike, what they share may be there once: its length is in `lengths` then, and `branches`
    has, at the same index, the lengths of what follows in each of them. In the tokens the branches come after their
    stem; a branch sees the stem and itself.
    """

    def __init__(self, lengths: Sequence[int], branches: Sequence[Sequence[int]] | None = None) -> None:
        self.trees: list[Tree] = []
        start = 0
        for length, in_tree in zip(lengths, branches or [()] * len(lengths), strict=True):
            stem = start + length
            ends: list[int] = []
            for of_branch in in_tree:
                ends.append((ends[-1] if ends else stem) + of_branch)
            tree = Tree(start, stem, tuple(ends))
            start = tree.end
            if tree.end > tree.start:
                self.trees.append(tree)
        self._attend: Run | None = None
        """How attention is computed in all layers; None until the first layer has chosen."""
        self.choice = ""
        """How attention is computed, in words; "" until the first layer has chosen."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.trees:
            # Nothing to attend to, but all three stay in the graph: a rank without work still runs its collectives.
            return torch.cat((q, k, v), dim=1)[:, : q.shape[1]]
        if self._attend is None:
            self._attend = self._chosen(q)
        return self._attend(q, k, v)

    def _chosen(self, q: Tensor) -> "Run":
        if q.device.type == "cpu":
            self.choice = "tiles, on a CPU"
            return partial(cpu_attention.attend, tiles=list(cpu_attention.tiles(self.trees, q.shape[1])))
        reason = varlen_attention.why_not(q.dtype, q.shape[2], varlen_attention.capability_of(q.device))
        if not reason:
            self.choice = "one variable-length kernel a layer"
            return varlen_attention.VarlenAttention(self.trees, q.device)
        self.choice = f"one call a document and layer: {reason}"
        _tell(f"attention is {self.choice}")
        return partial(by_document, self.trees)


Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of the batch that it was made for: q [T, H, D], k and v [T, K, D] -> [T, H, D]."""


@cache
def _tell(sentence: str) -> None:
    """Write the sentence to the slot's log, once."""
    print(sentence, file=sys.stderr)


def by_document(trees: Sequence[Tree], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's kernel for one document a call: a call for each stem, and for each branch, which finds the stem's keys
    before its own. Used on devices and for types that have no kernel for all documents at once."""
    grouped = q.shape[1] != k.shape[1]
    outputs: list[Tensor] = []
    for tree in trees:
        stem = slice(tree.start, tree.stem)
        if tree.stem > tree.start:
            qkv = _heads_first(q[stem], k[stem], v[stem])
            outputs.append(scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=grouped))
        for start, end in tree.branches:
            if end > start:
                keys, values = (torch.cat((x[stem], x[start:end])) for x in (k, v))
                mask = causal_lower_right(end - start, len(keys))
                qkv = _heads_first(q[start:end], keys, values)
                outputs.append(scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=grouped))
    return torch.cat([output[0].transpose(0, 1) for output in outputs])


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
