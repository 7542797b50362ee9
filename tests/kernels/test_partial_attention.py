"""Attention to keys that come in blocks is attention to all of them, and so are its gradients."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from ductile.kernels import dispatch
from ductile.kernels.partial_attention import (
    CPU_FLASH,
    PLAIN,
    ChunkedAttention,
    Merged,
    PartialAttention,
    VarlenPartialAttention,
)

LENGTHS = (5, 1, 1, 16)
NUM_HEADS, HEAD_SIZE = 4, 8


def inputs(num_kv_heads: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """q, two blocks of keys and values, and the output's gradient; cut out of wider rows, as in the model."""
    random = torch.Generator().manual_seed(3)
    heads = (NUM_HEADS, num_kv_heads, num_kv_heads, num_kv_heads, num_kv_heads, NUM_HEADS)
    wide = torch.randn((sum(LENGTHS), sum(heads), HEAD_SIZE), generator=random).to(device, dtype)
    return list(wide.split(heads, dim=1))


def in_blocks(attention: PartialAttention, given: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients, where a query sees the first block up to its own place and the second one whole."""
    q, k, v, more_k, more_v, grad = given
    merged = Merged(*attention.attend(q, k, v, True))
    merged.add(*attention.attend(q, more_k, more_v, False))
    out = merged.out.to(q.dtype)
    of_q, of_k, of_v = attention.gradients(grad, q, k, v, out, merged.lse, True)
    more_of_q, *of_more = attention.gradients(grad, q, more_k, more_v, out, merged.lse, False)
    return [out, of_q + more_of_q, of_k, of_v, *of_more]


def all_at_once(given: Sequence[Tensor]) -> list[Tensor]:
    q, k, v, more_k, more_v, grad = (x.detach().cpu().double().requires_grad_() for x in given)
    outs: list[Tensor] = []
    for start, end in pairwise(np.cumsum([0, *LENGTHS]).tolist()):
        keys, values = (torch.cat(pair).repeat_interleave(q.shape[1] // k.shape[1], dim=1) for pair in (
            (k[start:end], more_k[start:end]), (v[start:end], more_v[start:end])
        ))  # fmt: skip
        scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * HEAD_SIZE**-0.5
        own = torch.ones((end - start,) * 2, dtype=torch.bool)
        seen = torch.cat((own.tril(), own), dim=1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
    out = torch.cat(outs)
    return [out, *torch.autograd.grad(out, (q, k, v, more_k, more_v), grad)]


def compare(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kernel", [CPU_FLASH, PLAIN], ids=["flash", "plain"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_blocks_are_put_together(kernel, num_kv_heads: int, dtype: torch.dtype, tolerance: float) -> None:
    given = inputs(num_kv_heads, dtype)
    compare(in_blocks(ChunkedAttention(LENGTHS, kernel), given), all_at_once(given), tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_blocks_are_put_together_on_a_gpu(num_kv_heads: int, dtype: torch.dtype, tolerance: float) -> None:
    given = inputs(num_kv_heads, dtype, "cuda")
    attention = dispatch.partial_attention(LENGTHS, given[0])
    assert isinstance(attention, VarlenPartialAttention if dtype == torch.bfloat16 else ChunkedAttention)
    compare(in_blocks(attention, given), all_at_once(given), tolerance)


def test_the_numbers_of_a_head_may_lie_apart_in_memory() -> None:
    given = [each.mT.contiguous().mT for each in inputs(2, torch.float32)]
    assert given[0].stride(-1) != 1
    compare(in_blocks(ChunkedAttention(LENGTHS, CPU_FLASH), given), all_at_once(given), 1e-5)


def test_a_block_that_weighs_nothing_changes_nothing() -> None:
    out, lse = torch.randn(2, 1, 4), torch.zeros(2, 1)
    merged = Merged(out.clone(), lse)
    merged.add(torch.randn(2, 1, 4), torch.full((2, 1), -1e4))
    assert torch.equal(merged.out, out)
    assert torch.equal(merged.lse, lse)


def test_parts_are_merged_in_fp32() -> None:
    ones = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    merged = Merged(ones, torch.zeros(1, 1))
    for _ in range(3):
        merged.add(ones * 1.0078125, torch.zeros(1, 1))  # the next number of bf16
    assert merged.out.dtype == torch.float32
    assert 1.005 < merged.out.item() < 1.0065
    assert merged.lse.item() == pytest.approx(np.log(4))
