"""Attention over documents packed one after the other, without leak from one to the next.

T tokens, H query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from ductile.kernels.dispatch import AttentionFunction, packed_attention
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
            stem, *ends = accumulate(in_tree, initial=start + length)
            tree = Tree(start, stem, tuple(ends))
            start = tree.end
            if tree.end > tree.start:
                self.trees.append(tree)
        self._attend: AttentionFunction | None = None
        """How attention is computed in all layers; None until the first layer has chosen."""
        self.choice = ""
        """How attention is computed, in words; "" until the first layer has chosen."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.trees:
            # Nothing to attend to, but all three stay in the graph: a rank without work still runs its collectives.
            return torch.cat((q, k, v), dim=1)[:, : q.shape[1]]
        if self._attend is None:
            self._attend, self.choice = packed_attention(self.trees, q)
        return self._attend(q, k, v)
