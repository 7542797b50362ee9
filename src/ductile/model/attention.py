"""Attention over documents packed one after the other, without leak from one to the next.

T tokens, H query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ductile.model import cpu_attention


class Attend(Protocol):
    """The seam between the model and whoever keeps keys and values: a packed batch here, a paged cache elsewhere."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, K, D], after norms and rotation -> [T, H, D]."""
        ...


@dataclass(frozen=True, slots=True)
class Tree:
    """Where documents that begin alike lie: rows `start` to `stem`, then up to each of `ends` a branch."""

    start: int
    stem: int
    ends: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.ends[-1] if self.ends else self.stem

    @property
    def branches(self) -> list[tuple[int, int]]:
        """First row and end of each."""
        return list(pairwise((self.stem, *self.ends)))


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
        self._tiles: list[cpu_attention.Tile] | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.trees:
            # Nothing to attend to, but all three stay in the graph: a rank without work still runs its collectives.
            return torch.cat((q, k, v), dim=1)[:, : q.shape[1]]
        if q.device.type == "cpu":
            if self._tiles is None:
                self._tiles = list(cpu_attention.tiles(self.trees, q.shape[1]))
            return cpu_attention.attend(q, k, v, self._tiles)
        return torch.cat([part for tree in self.trees for part in by_document(tree, q, k, v)])


def by_document(tree: Tree, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """torch's kernel, one call for the stem and one for each branch, which finds the stem's keys before its own."""
    grouped = q.shape[1] != k.shape[1]
    stem = slice(tree.start, tree.stem)
    outputs = [
        scaled_dot_product_attention(*_heads_first(q[stem], k[stem], v[stem]), is_causal=True, enable_gqa=grouped)
    ]
    for start, end in tree.branches:
        keys, values = (torch.cat((x[stem], x[start:end])) for x in (k, v))
        mask = causal_lower_right(end - start, len(keys))
        qkv = _heads_first(q[start:end], keys, values)
        outputs.append(scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=grouped))
    return [output[0].transpose(0, 1) for output in outputs]


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
