"""Attention of a decode step whose shapes and addresses do not depend on its sequences, as a CUDA graph needs it.

What says where the sequences lie is read from tensors that are there before the step and keep their memory: the table
of blocks, and each sequence's length. Two kernels do with that:

| kernel | reads | where |
|---|---|---|
| `PagedDecode` | the cache itself, each sequence as far as it goes | torch's variable-length kernel, `block_size` a multiple of 256 |
| `GatheredDecode` | copies of all blocks of the table, padded and masked | everywhere else |

N sequences, W blocks in the table, S tokens in them, H query heads, K key/value heads, D head size.
"""  # noqa: E501

from collections.abc import Callable

import torch
from torch import Tensor

from ductile.generator.engine.paged_attention import KVCache, decode, decode_mask
from ductile.kernels import varlen_attention


class GatheredDecode:
    """One new token of each of N sequences, over blocks that are copied side by side."""

    def __init__(self, cache: KVCache, slots: Tensor, blocks: Tensor, lengths: Tensor) -> None:
        """slots [N]: where the new keys and values go. blocks [N, W], lengths [N]: with the new token."""
        self._cache, self._slots, self._blocks = cache, slots, blocks
        self._mask = decode_mask(lengths, blocks.shape[1] * cache.block_size, cache.dtype)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, D], k and v [N, K, D] -> [N, H, D]"""
        self._cache.write(layer, self._slots, k, v)
        return decode(self._cache, layer, self._blocks, self._mask, q)


class PagedDecode:
    """One new token of each of N sequences, over blocks that the kernel finds itself."""

    def __init__(self, cache: KVCache, slots: Tensor, blocks: Tensor, lengths: Tensor) -> None:
        """Take the same as `GatheredDecode` does."""
        self._cache, self._slots = cache, slots
        self._blocks, self._lengths = blocks.to(torch.int32), lengths.to(torch.int32)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, D], k and v [N, K, D] -> [N, H, D]"""
        self._cache.write(layer, self._slots, k, v)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        return varlen_attention.paged_decode(q, keys, values, self._blocks, self._lengths)


StaticAttention = Callable[[KVCache, Tensor, Tensor, Tensor], GatheredDecode | PagedDecode]


def static_attention(cache: KVCache) -> tuple[StaticAttention, str]:
    """Return the kernel for this cache, and why it is not the one that reads the cache in place; "" where it is."""
    capability = varlen_attention.capability_of(cache.keys.device)
    reason = varlen_attention.why_not_paged(cache.dtype, cache.keys.shape[-1], capability, cache.block_size)
    return (GatheredDecode, reason) if reason else (PagedDecode, "")
