"""Paged attention against a loop over tokens that knows no pages, no groups and no padding."""

import math
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.core.layout.model.spec import ModelSpec
from ductile.generator.engine import paged_attention as attention
from ductile.generator.engine.paged_attention import (
    GROUP_COST_TOKENS,
    KVCache,
    PagedAttention,
    group_by_length,
    order_for_attention,
    without_cudnn,
)
from ductile.generator.engine.scheduler import Chunk
from ductile.generator.engine.sequence import Sequence
from ductile.records import GenerateRequest, Sampling
from tests.nightly import examples

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SPEC = ModelSpec("qwen3", 10, 32, 48, 1, HEADS, KV_HEADS, HEAD_DIM)


def sequence(blocks: list[int]) -> Sequence:
    made = Sequence(GenerateRequest("", (1,), Sampling()), (0, 0), 0, 1000, ())
    made.blocks = blocks
    return made


def attend_to(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One token: q [H, D], keys and values [S, K, D] -> [H, D]"""
    heads: list[torch.Tensor] = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        weights = (keys[:, shared] @ q[head] / math.sqrt(HEAD_DIM)).softmax(0)
        heads.append(weights @ values[:, shared])
    return torch.stack(heads)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), min_size=1, max_size=6), st.integers(1, 5))
def test_equals_the_loop(shapes: list[tuple[int, int]], block_size: int) -> None:
    """Sequences of `start` cached and `count` new tokens, in blocks scattered over the cache."""
    rng = torch.Generator().manual_seed(len(shapes))
    num_blocks = [-(-(start + count) // block_size) for start, count in shapes]
    scattered = torch.randperm(sum(num_blocks), generator=rng).split(num_blocks)
    cache = KVCache(SPEC, sum(num_blocks), block_size, torch.float32, "cpu")
    chunks: list[Chunk] = []
    whole: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for (start, count), blocks in zip(shapes, scattered, strict=True):
        chunk = Chunk(sequence(blocks.tolist()), start, count)
        keys, values = (torch.randn(start + count, KV_HEADS, HEAD_DIM, generator=rng) for _ in range(2))
        whole[id(chunk.sequence)] = (keys, values)
        slots = [chunk.sequence.blocks[i // block_size] * block_size + i % block_size for i in range(start)]
        cache.write(0, torch.tensor(slots, dtype=torch.int64), keys[:start], values[:start])
        chunks.append(chunk)
    chunks = order_for_attention(chunks)
    q = torch.randn(sum(chunk.count for chunk in chunks), HEADS, HEAD_DIM, generator=rng)
    new = [whole[id(chunk.sequence)] for chunk in chunks]
    k = torch.cat([keys[chunk.start :] for chunk, (keys, _) in zip(chunks, new, strict=True)])
    v = torch.cat([values[chunk.start :] for chunk, (_, values) in zip(chunks, new, strict=True)])
    found = PagedAttention(cache, chunks)(0, q, k, v)
    row = 0
    for chunk, (keys, values) in zip(chunks, new, strict=True):
        for position in range(chunk.start, chunk.end):
            expected = attend_to(q[row], keys[: position + 1], values[: position + 1])
            torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-4)
            row += 1


@pytest.mark.parametrize("room", [0, 3, 64])
@pytest.mark.parametrize("spare_blocks", [0, 100])
def test_windows_change_nothing(monkeypatch: pytest.MonkeyPatch, room: int, spare_blocks: int) -> None:
    """Twelve decode steps, each with the attention of the step before and without. A sequence goes, another comes."""
    monkeypatch.setattr(attention, "WINDOW_ROOM_TOKENS", room)
    rng = torch.Generator().manual_seed(0)
    cache = KVCache(SPEC, 40 + spare_blocks, 4, torch.float32, "cpu")
    cache.keys.normal_(generator=rng)
    cache.values.normal_(generator=rng)
    sequences = [sequence(torch.arange(i * 10, i * 10 + 10).tolist()) for i in range(4)]
    before, windows = None, 0
    for step in range(12):
        members = zip((5, 6, 11, 20), sequences, strict=True)
        present = [pair for pair in members if pair[1] is not sequences[2 if step < 6 else 1]]
        chunks = order_for_attention([Chunk(one, length + step, 1) for length, one in present])
        q, k, v = (torch.randn(3, heads, HEAD_DIM, generator=rng) for heads in (HEADS, KV_HEADS, KV_HEADS))
        expected = PagedAttention(cache, chunks)(0, q, k, v)
        before = PagedAttention(cache, chunks, before)
        torch.testing.assert_close(before(0, q, k, v), expected, atol=1e-5, rtol=1e-4)
        windows += sum(isinstance(part, attention._Window) for part in before._decodes)
    assert windows == 10 if spare_blocks else windows < 10, "windows take at most half of what the cache has"


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.sampled_from(list(GROUP_COST_TOKENS)))
def test_groups_never_pad_more_than_they_save(lengths: list[int], device_type: str) -> None:
    chunks = [Chunk(sequence([]), length - 1, 1) for length in sorted(lengths)]
    groups = group_by_length(chunks, device_type)
    assert [chunk for group in groups for chunk in group] == chunks
    for group, following in pairwise(groups):
        assert num_padded([*group, following[0]]) > GROUP_COST_TOKENS[device_type]
    assert all(num_padded(group) <= GROUP_COST_TOKENS[device_type] for group in groups)


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 200))
def test_groups_stay_while_no_sequence_comes_or_goes(lengths: list[int], num_steps: int) -> None:
    sequences = [(sequence([]), length) for length in sorted(lengths)]

    def groups_at(step: int) -> list[list[Sequence]]:
        chunks = [Chunk(each, length + step - 1, 1) for each, length in sequences]
        return [[chunk.sequence for chunk in group] for group in group_by_length(chunks, "cpu")]

    assert groups_at(num_steps) == groups_at(0)


@pytest.mark.parametrize("enabled", [True, False])
def test_cudnn_is_left_out_meanwhile_and_as_it_was_afterwards(enabled: bool) -> None:
    usual = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        with suppress(KeyError), without_cudnn():
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            raise KeyError("a bug")
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(usual)


def num_padded(group: list[Chunk]) -> int:
    """Tokens that the longest has and the others lack."""
    return sum(group[-1].end - chunk.end for chunk in group)
