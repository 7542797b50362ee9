"""Attention of queries to some of their keys, and the log-sum-exp by which such parts are put together.

The keys of a query may come in several blocks, one after the other. Each block's output is right but for its weight:
by `lse`, the logarithm of the sum of its exponentials, `Merged` weighs it against the others. A block's gradients need
the output and the lse of all blocks together.

Queries, keys and values are chunks of documents that follow each other; the chunk of a document has as many queries as
keys, and sees all of them, or those up to its own place (`causal`).

S tokens, N chunks of one length, C tokens of each, H query heads, K key/value heads, G = H / K, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ductile.kernels.cpu_attention import readable
from ductile.kernels.equal_sequences import equal_sequences
from ductile.kernels.plain import wide_type


class PartialAttention(Protocol):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """q [S, H, D], k and v [S, K, D] -> output [S, H, D] and lse [S, H], which is fp32 or more."""
        ...

    def gradients(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v through this block, where `out` and `lse` are those of all blocks together, and
        `grad` is the gradient of `out`."""
        ...


class Merged:
    """Output of the blocks seen so far, in fp32 or more."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        """The first block's, which every query sees."""
        self.out, self.lse = out.to(wide_type(out)), lse

    def add(self, out: Tensor, lse: Tensor) -> None:
        total = torch.logaddexp(self.lse, lse)
        self.out.mul_((self.lse - total).exp_()[..., None]).addcmul_(out, (lse - total).exp_()[..., None])
        self.lse = total


@dataclass(frozen=True, slots=True)
class BlockKernel:
    """Attention of N chunks of one length, heads before tokens."""

    attend: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    """Function of q [N, H, C, D], k and v [N, K, C, D] and whether it is causal: output [N, H, C, D], lse [N, H, C]."""
    gradients: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]
    """Function of the output's gradient, q, k, v, output, lse and whether it is causal: gradients of q, k and v."""


class ChunkedAttention:
    """One call of a kernel for all chunks of equal length that follow each other."""

    def __init__(self, lengths: Sequence[int], kernel: BlockKernel) -> None:
        self._runs = list(equal_sequences(lengths))
        self._kernel = kernel

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        found: list[tuple[Tensor, Tensor]] = []
        for run in self._runs:
            queries, keys, values = map(run.heads_first, (q, k, v))
            found.append(self._kernel.attend(queries, keys, values, causal))
        outs, lses = zip(*found, strict=True)
        return _tokens_first(outs), _tokens_first(lses)

    def gradients(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for run in self._runs:
            grads, queries, keys, values, outs, lses = map(run.heads_first, (grad, q, k, v, out, lse))
            found.append(self._kernel.gradients(grads, queries, keys, values, outs, lses, causal))
        of_q, of_k, of_v = zip(*found, strict=True)
        return _tokens_first(of_q), _tokens_first(of_k), _tokens_first(of_v)


class VarlenPartialAttention:
    """One call of torch's variable-length flash kernel for all chunks, on a GPU that has it for these heads.

    `varlen_attn` itself does not take the lse of other blocks in its backward pass; its two operators do.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        offsets = np.cumsum([0, *lengths]).astype(np.int32)
        self._offsets, self._longest = torch.from_numpy(offsets).to(device), max(lengths)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        lies = (self._offsets, self._offsets, self._longest, self._longest)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *lies, 0.0, causal, return_debug_mask=False)
        return out, lse.t()

    def gradients(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        lies = (self._offsets, self._offsets, self._longest, self._longest)
        no_dropout = (torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device))
        lse = lse.t().contiguous()
        return torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, *lies, 0.0, causal, *no_dropout)


def _flash_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = map(readable, (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _flash_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(*map(readable, (grad, q, k, v, out)), lse, 0.0, causal)


CPU_FLASH = BlockKernel(_flash_attend, _flash_gradients)
"""torch's fused kernel for CPUs, which is tiled: the scores of a chunk never are all there."""


def _plain_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse[..., None]).exp_()
    out = probabilities @ v[:, :, None].to(scores.dtype)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _plain_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    kept = lse.unflatten(1, (k.shape[1], -1))[..., None]
    probabilities = (_scores(q, k, causal) - kept).exp_()
    grads, queries, outs = (_grouped(x, k).to(probabilities.dtype) for x in (grad, q, out))
    of_probabilities = grads @ v[:, :, None].to(grads.dtype).transpose(-1, -2)
    of_scores = (of_probabilities - (grads * outs).sum(-1, keepdim=True)) * probabilities * q.shape[-1] ** -0.5
    of_q = of_scores @ k[:, :, None].to(grads.dtype)
    of_k = (of_scores.transpose(-1, -2) @ queries).sum(2)
    of_v = (probabilities.transpose(-1, -2) @ grads).sum(2)
    return of_q.flatten(1, 2).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


PLAIN = BlockKernel(_plain_attend, _plain_gradients)
"""Plain products in fp32 or more, for devices and dtypes that no kernel is for. All scores of a chunk are there."""


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """[N, K, G, C, C]: -inf where a query does not see a key."""
    wide = wide_type(q)
    scores = _grouped(q, k).to(wide) @ k[:, :, None].to(wide).transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores + torch.full_like(scores[0, 0, 0], -torch.inf).triu_(1) if causal else scores


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[N, H, C, D] -> [N, K, G, C, D]."""
    return x.unflatten(1, (k.shape[1], -1))


def _tokens_first(of_runs: Sequence[Tensor]) -> Tensor:
    """[N, H, C, ...] of each run -> [S, H, ...]."""
    parts: list[Any] = [x.transpose(1, 2).flatten(0, 1) for x in of_runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
