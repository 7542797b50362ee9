"""Attention over the paged cache, plugged into the model's `attend` seam. One `PagedAttention` is made for each step;
it takes over from that of the step before what still fits.

1. All new keys and values are written to their blocks first, so that a chunk may read what another one of the same
   step writes.
2. Sequences with one new token (decode) are grouped by length; a group gathers its blocks into one padded tensor and
   runs one fused attention. The query heads that share a key head stand in for query positions, so keys and values
   are read once and never repeated.
3. A group that decodes again, with no sequence gone or new, keeps what it gathered side by side (a window), and from
   then on only adds the new token: nothing is copied any more. Windows together take at most half as much memory as
   the cache.
4. Longer chunks (prefill) of the same shape run together: straight from the step's own keys and values when they
   begin a sequence, over gathered blocks otherwise.

T tokens of the step, H query heads, K key/value heads, G = H / K, D head size, S padded length.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ductile.core.layout.model.spec import ModelSpec
from ductile.fabric.pages import zeros_on_demand
from ductile.generator.engine import sequence
from ductile.generator.engine.scheduler import Chunk

GROUP_COST_TOKENS = {"cpu": 256, "cuda": 32768}
"""Padded tokens whose reading costs about as much as one more group, by type of device. Measured on a CPU with 2 key
heads of 64; estimated for a GPU with 8 of 128, where a group is some eight kernel launches a layer."""

WINDOW_ROOM_TOKENS = 64
"""Tokens that a window has room for beyond its longest sequence; when they are used up it is made anew."""


@contextmanager
def without_cudnn() -> Generator[None]:
    """Meanwhile torch's attention does without cuDNN, which makes a plan for each new shape in up to 0.1 s, and every
    step of an engine has new shapes."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


class KVCache:
    """The tensors behind `BlockPool`: keys and values [layers, blocks, block size, K, D]. They have one block more than
    the pool: whatever is written there is nobody's (`spare_block`)."""

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: str) -> None:
        shape = (spec.num_layers, num_blocks + 1, block_size, spec.num_kv_heads, spec.head_dim)
        # Zeros, not empty: padding is read and masked, and a masked NaN is still a NaN.
        self.keys = zeros_on_demand(shape, dtype, device)
        self.values = zeros_on_demand(shape, dtype, device)
        self._rows = _rows(self.keys, self.values)
        self.block_size = block_size
        self.num_tokens = num_blocks * block_size
        self.spare_block = num_blocks

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    def shape_outside(self, num_tokens: int) -> tuple[int, ...]:
        """Shape of what `take_out` returns."""
        return (2, self.keys.shape[0], num_tokens, *self.keys.shape[-2:])

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k and v [T, K, D] where `slots` [T] says: block * block_size + offset."""
        keys, values = self._rows[layer]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """`blocks` [N, S / block size] -> keys and values [N, K, S, D]."""
        shape = (blocks.shape[0], -1, *self.keys.shape[-2:])
        k = self.keys[layer].index_select(0, blocks.flatten()).view(shape)
        v = self.values[layer].index_select(0, blocks.flatten()).view(shape)
        return k.transpose(1, 2), v.transpose(1, 2)

    def take_out(self, blocks: Sequence[int], num_tokens: int) -> Tensor:
        """A copy, on the CPU, of the first tokens of the sequence that has these blocks: [2, layers, tokens, K, D]."""
        slots = self._slots(blocks, 0, num_tokens)
        content = self.keys.new_empty(self.shape_outside(num_tokens))
        for cached, part in zip((self.keys, self.values), content, strict=True):
            torch.index_select(cached.flatten(1, 2), 1, slots, out=part)
        return content.cpu()

    def put_in(self, blocks: Sequence[int], start: int, end: int, content: Tensor) -> None:
        """Copy tokens `start : end` of what `take_out` returned into the blocks of another sequence."""
        slots = self._slots(blocks, start, end)
        for cached, part in zip((self.keys, self.values), content, strict=True):
            cached.flatten(1, 2).index_copy_(1, slots, part[:, start:end].to(cached.device))

    def _slots(self, blocks: Sequence[int], start: int, end: int) -> Tensor:
        """Rows of the cache in which these tokens of a sequence lie."""
        positions = torch.arange(start, end)
        slots = torch.tensor(blocks)[positions // self.block_size] * self.block_size + positions % self.block_size
        return slots.to(self.keys.device)


def _rows(keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """[layers, N, S, K, D] -> for each layer [N S, K, D], in the same memory. Made once: to make a view takes as
    long as to write the new tokens of a step."""
    return list(zip(keys.flatten(1, 2), values.flatten(1, 2), strict=True))


class PagedAttention:
    """`chunks` in the order of their tokens in the batch, as `order_for_attention` gives them. `before` is that of the
    step before; it gives its windows away and must not be called any more."""

    def __init__(self, cache: KVCache, chunks: Sequence[Chunk], before: "PagedAttention | None" = None) -> None:
        self._cache = cache
        device = cache.keys.device
        self._slots = torch.from_numpy(_slots(chunks, cache.block_size)).to(device)
        decodes = [chunk for chunk in chunks if chunk.count == 1]
        prefills = groupby(chunks[len(decodes) :], key=_shape)
        self._decodes = _decode_parts(cache, group_by_length(decodes, device.type), before)
        self._parts = [*self._decodes, *(_Prefill(cache, list(group)) for _, group in prefills)]
        self._sizes = [part.num_tokens for part in self._parts]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H, D]"""
        self._cache.write(layer, self._slots, k, v)
        if len(self._parts) == 1:
            return self._parts[0].attend(layer, q, k, v)
        split = zip(self._parts, q.split(self._sizes), k.split(self._sizes), v.split(self._sizes), strict=True)
        outputs = [part.attend(layer, *qkv) for part, *qkv in split]
        return torch.cat(outputs)


class _Decode:
    """One new token of each of N sequences."""

    def __init__(self, cache: KVCache, chunks: Sequence[Chunk]) -> None:
        self.num_tokens = len(chunks)
        self.next_members = _members(chunks, ahead=1)
        self._cache = cache
        self._blocks = _padded_blocks(chunks, cache)
        lengths = torch.tensor([chunk.end for chunk in chunks], device=self._blocks.device)
        self._mask = decode_mask(lengths, self._blocks.shape[1] * cache.block_size, cache.dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return decode(self._cache, layer, self._blocks, self._mask, q)


class _Window:
    """One new token of each of N sequences, whose keys and values are kept in tensors [layers, N, S, K, D]."""

    def __init__(self, cache: KVCache, chunks: Sequence[Chunk]) -> None:
        """`chunks` from the shortest to the longest. Holds all but the new tokens at first."""
        self.num_tokens = len(chunks)
        self.next_members = _members(chunks, ahead=1)
        self.room = _window_len(chunks, cache.block_size)
        blocks = _padded_blocks(chunks, cache, self.room // cache.block_size)
        keys, values = (_gather(tensor, blocks) for tensor in (cache.keys, cache.values))
        self._rows = _rows(keys, values)
        self._heads = list(zip(keys.transpose(2, 3), values.transpose(2, 3), strict=True))
        starts = torch.tensor([chunk.start for chunk in chunks], device=blocks.device)
        columns = torch.arange(self.room, device=blocks.device)
        mask = torch.zeros((len(chunks), self.room), dtype=cache.keys.dtype, device=blocks.device)
        self._mask = mask.masked_fill_(columns > starts[:, None], -torch.inf)[:, None, None, :]
        self._slots = torch.arange(len(chunks), device=blocks.device) * self.room + starts
        self._longest = chunks[-1].end
        self._seen = self._mask[..., : self._longest]

    def advance(self, chunks: Sequence[Chunk]) -> None:
        """Go on to the next token of the same sequences."""
        self.next_members = _members(chunks, ahead=1)
        self._slots += 1
        self._mask.view(-1).index_fill_(0, self._slots, 0.0)
        self._longest += 1
        self._seen = self._mask[..., : self._longest]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_NKGD = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
        key_rows, value_rows = self._rows[layer]
        key_rows.index_copy_(0, self._slots, k)
        value_rows.index_copy_(0, self._slots, v)
        keys, values = (x.narrow(2, 0, self._longest) for x in self._heads[layer])
        return scaled_dot_product_attention(q_NKGD, keys, values, attn_mask=self._seen).reshape(q.shape)


class _Prefill:
    """`count` new tokens from position `start` on of each of N sequences."""

    def __init__(self, cache: KVCache, chunks: Sequence[Chunk]) -> None:
        self._cache = cache
        self._num = len(chunks)
        start, count = _shape(chunks[0])
        self.num_tokens = self._num * count
        self._blocks: Tensor | None = None
        if start:
            self._blocks = _padded_blocks(chunks, cache)
            columns = torch.arange(self._blocks.shape[1] * cache.block_size, device=self._blocks.device)
            rows = torch.arange(start, start + count, device=self._blocks.device)
            self._mask = columns <= rows[:, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_NHCD = q.unflatten(0, (self._num, -1)).transpose(1, 2)
        grouped = q.shape[1] != k.shape[1]
        if self._blocks is None:
            keys, values = (x.unflatten(0, (self._num, -1)).transpose(1, 2) for x in (k, v))
            out = scaled_dot_product_attention(q_NHCD, keys, values, is_causal=True, enable_gqa=grouped)
        else:
            keys, values = self._cache.read(layer, self._blocks)
            out = scaled_dot_product_attention(q_NHCD, keys, values, attn_mask=self._mask, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)


def decode_mask(lengths: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Return what hides tokens beyond `lengths` [N] of `num_tokens` from the queries: [N, 1, 1, S]. Additive, in the
    queries' type: a boolean one would be converted anew in every layer."""
    beyond = torch.arange(num_tokens, device=lengths.device) >= lengths[:, None]
    mask = torch.zeros(beyond.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(beyond, -torch.inf)[:, None, None, :]


def decode(cache: KVCache, layer: int, blocks: Tensor, mask: Tensor, q: Tensor) -> Tensor:
    """Attention of one token of each of N sequences to the blocks [N, S / block size] that it has in the cache:
    q [N, H, D] -> [N, H, D]."""
    keys, values = cache.read(layer, blocks)
    q_NKGD = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[2])
    return scaled_dot_product_attention(q_NKGD, keys, values, attn_mask=mask).reshape(q.shape)


def order_for_attention(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Decodes first, short ones before long ones; then prefills, those of one shape together."""
    return sorted(chunks, key=lambda chunk: (chunk.count > 1, chunk.start, chunk.count))


def group_by_length(decodes: Sequence[Chunk], device_type: str) -> list[list[Chunk]]:
    """Cut a list that is sorted by length where padding the shorter ones would cost more than one more group. While no
    sequence comes or goes the groups stay as they are: all grow by one token a step."""
    groups: list[list[Chunk]] = []
    longest = num_padded = 0
    for chunk in decodes:
        num_padded += (chunk.end - longest) * len(groups[-1]) if groups else 0
        if groups and num_padded <= GROUP_COST_TOKENS[device_type]:
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
            num_padded = 0
        longest = chunk.end
    return groups


def _decode_parts(
    cache: KVCache, groups: Sequence[Sequence[Chunk]], before: PagedAttention | None
) -> list[_Decode | _Window]:
    """Windows for the groups that decoded in the step before already, as long as there is memory."""
    last = {part.next_members: part for part in before._decodes} if before else {}  # pyright: ignore[reportPrivateUsage]
    parts: list[_Decode | _Window] = []
    free_tokens = cache.num_tokens // 2
    for group in groups:
        part = last.get(_members(group))
        if isinstance(part, _Window) and group[-1].end <= part.room:
            part.advance(group)
        elif part and len(group) * _window_len(group, cache.block_size) <= free_tokens:
            part = _Window(cache, group)
        else:
            part = _Decode(cache, group)
        if isinstance(part, _Window):
            free_tokens -= len(group) * part.room
        parts.append(part)
    return parts


Members = tuple[tuple[sequence.Sequence, int, int], ...]
"""Members of a group: each sequence, the weights its cache was begun under, and the position of its token."""


def _members(chunks: Sequence[Chunk], ahead: int = 0) -> Members:
    """Equal members read the same keys and values: a sequence computed again under other weights is another one."""
    return tuple((chunk.sequence, chunk.sequence.weights_serial, chunk.start + ahead) for chunk in chunks)


def _window_len(chunks: Sequence[Chunk], block_size: int) -> int:
    """Tokens of a new window: whole blocks, as it is gathered from the cache in one pass."""
    return -(-(chunks[-1].end + WINDOW_ROOM_TOKENS) // block_size) * block_size


def _shape(chunk: Chunk) -> tuple[int, int]:
    return chunk.start, chunk.count


def _padded_blocks(chunks: Sequence[Chunk], cache: KVCache, num_blocks: int | None = None) -> Tensor:
    """Blocks of each chunk [N, num_blocks], by default as many as the longest has. Shorter rows go on with block 0,
    which is masked."""
    used = [chunk.blocks(cache.block_size) for chunk in chunks]
    padded = np.zeros((len(used), num_blocks or max(map(len, used))), dtype=np.int64)
    for row, blocks in zip(padded, used, strict=True):
        row[: len(blocks)] = blocks
    return torch.from_numpy(padded).to(cache.keys.device)


def _gather(cached: Tensor, blocks: Tensor) -> Tensor:
    """[layers, blocks of the cache, block size, K, D] -> [layers, N, S, K, D]"""
    return cached.index_select(1, blocks.flatten()).view(cached.shape[0], blocks.shape[0], -1, *cached.shape[-2:])


def _slots(chunks: Sequence[Chunk], block_size: int) -> np.ndarray:
    """[T] where each token's key and value go."""
    slots: list[int] = []
    for chunk in chunks:
        position = chunk.start
        if chunk.count == 1:
            slots.append(chunk.sequence.blocks[position // block_size] * block_size + position % block_size)
            continue
        for block in chunk.blocks(block_size)[position // block_size :]:
            end = min(chunk.end, (position // block_size + 1) * block_size)
            first = block * block_size + position % block_size
            slots += range(first, first + end - position)
            position = end
    return np.array(slots, dtype=np.int64)
