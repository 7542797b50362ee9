"""Packed attention on a CPU: a few batched products a tile, and the backward pass in one piece.

torch's fused kernel takes one document a call, spends most of its time on short rows, and leaves autograd a dozen nodes
for each call, whose gradients are cut and joined again. Here a tile is several sequences of one length, or some rows of
a long one: its scores fit in a core's cache, it reads its rows out of whole tensors and adds its gradients to theirs. A
branch of a tree sees the stem's keys before its own. Probabilities are kept for the backward pass where a tile holds
whole sequences, which are short then; of long ones they are made again.

T tokens, N sequences of a tile, S tokens of each, P tokens of its stem, H query heads, K key/value heads, G = H / K, D
head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ductile.kernels.trees import Tree

TILE_SCORES = 1 << 19
"""Most scores of a tile, all heads together: 2 MiB in fp32."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows `start` to `end` are `num` sequences of one length; of each, the queries from `first` to `last` are run."""

    start: int
    end: int
    num: int
    first: int
    last: int
    stem: slice
    """Rows of the stem, which all sequences of the tile see besides their own; empty for a document on its own."""

    @property
    def is_whole(self) -> bool:
        return (self.last - self.first) * self.num == self.end - self.start

    def queries(self, x: Tensor, num_kv_heads: int) -> Tensor:
        """[T, H, D] -> [N, K, G, S, D], in the same memory."""
        own = x[self.start : self.end].unflatten(0, (self.num, -1))[:, self.first : self.last]
        return own.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)

    def own_keys(self, x: Tensor) -> Tensor:
        """[T, K, D] -> [N, K, S, D], in the same memory."""
        return x[self.start : self.end].unflatten(0, (self.num, -1))[:, : self.last].transpose(1, 2)

    def stem_keys(self, x: Tensor) -> Tensor:
        """[T, K, D] -> [K, P, D], in the same memory."""
        return x[self.stem].transpose(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """[T, K, D] -> [N K, P + S, D], a copy."""
        own = self.own_keys(x)
        return torch.cat((self.stem_keys(x).expand(self.num, -1, -1, -1), own), dim=2).flatten(0, 1)

    def mask(self, x: Tensor) -> Tensor:
        """[S, P + S]: 0 where a query sees a key, -inf elsewhere."""
        stem = self.stem.stop - self.stem.start
        beyond = x.new_full((self.last - self.first, stem + self.last), -torch.inf)
        return beyond.triu_(stem + self.first + 1)


def tiles(trees: "Sequence[Tree]", num_heads: int) -> Iterator[Tile]:
    for tree in trees:
        nothing = slice(tree.start, tree.start)
        yield from _tiles_of(tree.start, tree.stem, 1, nothing, num_heads)
        for length, equal in groupby(tree.branches, key=lambda branch: branch[1] - branch[0]):
            run = list(equal)
            if length:
                yield from _tiles_of(run[0][0], run[-1][1], len(run), slice(tree.start, tree.stem), num_heads)


def _tiles_of(start: int, end: int, num: int, stem: slice, num_heads: int) -> Iterator[Tile]:
    if end == start:
        return
    length = (end - start) // num
    a_row = num_heads * (stem.stop - stem.start + length)
    num_together = max(1, TILE_SCORES // (a_row * length))
    rows = max(1, min(length, TILE_SCORES // a_row))
    for sequence in range(0, num, num_together):
        here = min(num_together, num - sequence)
        first_row = start + sequence * length
        for first in range(0, length, rows):
            yield Tile(first_row, first_row + here * length, here, first, min(first + rows, length), stem)


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Tensor:
    """q [T, H, D], k and v [T, K, D] -> [T, H, D]."""
    return _TileAttention.apply(q, k, v, tiles)  # pyright: ignore


class _TileAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Tensor:
        out = q.new_empty(q.shape)
        kept: list[Tensor] = []
        for tile in tiles:
            queries = _flat(tile.queries(q, k.shape[1]))
            probabilities = _probabilities(tile, queries, tile.keys(k))
            heads_out = tile.queries(out, k.shape[1])
            heads_out.copy_(torch.bmm(probabilities, tile.keys(v)).view(heads_out.shape))
            if tile.is_whole:
                kept.append(probabilities)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.tiles = tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *kept = ctx.saved_tensors
        in_order = iter(kept)
        grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        for tile in ctx.tiles:
            queries, grad_out = (_flat(tile.queries(x, k.shape[1])) for x in (q, grad))
            keys, values = tile.keys(k), tile.keys(v)
            probabilities = next(in_order) if tile.is_whole else _probabilities(tile, queries, keys)
            grad_probabilities = torch.bmm(grad_out, values.transpose(1, 2))
            grad_scores = torch.ops.aten._softmax_backward_data(grad_probabilities, probabilities, -1, q.dtype)
            grad_scores.mul_(q.shape[-1] ** -0.5)
            heads_q = tile.queries(grad_q, k.shape[1])
            heads_q.copy_(torch.bmm(grad_scores, keys).view(heads_q.shape))
            _add_to_keys(tile, grad_k, torch.bmm(grad_scores.transpose(1, 2), queries))
            _add_to_keys(tile, grad_v, torch.bmm(probabilities.transpose(1, 2), grad_out))
        return grad_q, grad_k, grad_v, None


def _flat(queries: Tensor) -> Tensor:
    """[N, K, G, S, D] -> [N K, G S, D]: query heads that share keys follow each other."""
    return queries.flatten(2, 3).flatten(0, 1)


def _probabilities(tile: Tile, queries: Tensor, keys: Tensor) -> Tensor:
    """Probabilities [N K, G S, P + S] with which queries weigh values."""
    mask = tile.mask(queries).repeat(queries.shape[1] // (tile.last - tile.first), 1)
    scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=queries.shape[-1] ** -0.5)
    return torch.softmax(scores, -1)


def _add_to_keys(tile: Tile, total: Tensor, part: Tensor) -> None:
    """Add `part` [N K, P + S, D] to the rows of `total` [T, K, D]."""
    stem, own = part.unflatten(0, (tile.num, -1)).tensor_split([tile.stem.stop - tile.stem.start], dim=2)
    tile.own_keys(total).add_(own)
    if stem.shape[2]:
        tile.stem_keys(total).add_(stem.sum(0))
