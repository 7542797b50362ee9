"""Packed attention by torch's FlexAttention: one call a layer, whose mask says which tokens see each other.

A token sees its own sequence up to itself, and the stem of its tree. Stems and branches lie where they are: nothing is
gathered, and each stem's keys are there once, for all of its branches. Blocks of the mask that are empty cost nothing.

torch compiles the kernel, by Triton, for any number of tokens. On a CPU it has no backward pass. It has not been run on
a GPU: tests hold the mask and the call, in torch's uncompiled form on a CPU.

T tokens, H query heads, K key/value heads, D head size.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ductile.kernels.trees import Tree


def sequences_of_tokens(trees: Sequence[Tree]) -> tuple[np.ndarray, np.ndarray]:
    """Return for each token the number of its sequence, a stem or a branch, and that of its stem: [T] int32 each, of
    trees that follow each other from row 0 on.

    stem of 2, branches of 1 and 2       tokens a b | c | d e
    own      0 0 1 2 2
    stem     0 0 0 0 0
    """
    own, stem = (np.zeros(trees[-1].end, np.int32) for _ in range(2))
    number = 0
    for tree in trees:
        stem[tree.start : tree.end] = number
        for start, end in ((tree.start, tree.stem), *tree.branches):
            own[start:end] = number
            number += 1
    return own, stem


class FlexAttention:
    """Attention of one packed batch. Its mask is made once, for all layers."""

    def __init__(self, trees: Sequence[Tree], device: torch.device) -> None:
        own, stem = (torch.from_numpy(numbers).to(device) for numbers in sequences_of_tokens(trees))

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & ((own[key] == own[query]) | (own[key] == stem[query]))

        make_mask, self._attend = _functions(device.type)
        self._mask: BlockMask = make_mask(sees, None, None, len(own), len(own), device=device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H, D]."""
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        return self._attend(*heads_first, block_mask=self._mask, enable_gqa=q.shape[1] != k.shape[1])[0].transpose(0, 1)


@cache
def _functions(device_type: str) -> tuple[Callable[..., BlockMask], Callable[..., Any]]:
    """Return what makes a mask, and what attends by it."""
    if device_type == "cpu":
        return create_block_mask, flex_attention
    return torch.compile(create_block_mask), torch.compile(flex_attention)
