"""Attention over documents packed one after the other, without leak from one to the next.

T tokens, H query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Attend(Protocol):
    """The seam between the model and whoever keeps keys and values: a packed batch here, a paged cache elsewhere."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, K, D], after norms and rotation -> [T, H, D]."""
        ...


class PackedAttention:
    """Causal attention inside each document of `lengths`, which add up to T."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = [length for length in lengths if length > 0]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.lengths:
            # Nothing to attend to, but all three stay in the graph: a rank without work still runs its collectives.
            return torch.cat((q, k, v), dim=1)[:, : q.shape[1]]
        # One call a document. Padding them into a batch costs two copies each way and arithmetic on nothing: up to four
        # times slower where lengths differ much. Only documents of 30 tokens or fewer would gain, a tenth of the time.
        grouped = q.shape[1] != k.shape[1]
        documents = zip(*(x.transpose(0, 1)[None].split(self.lengths, dim=2) for x in (q, k, v)), strict=True)
        outputs = [scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=grouped) for qkv in documents]
        return torch.cat([output.transpose(1, 2) for output in outputs], dim=1)[0]
