"""Which implementation of each operation of the model runs. The model names operations; this page alone chooses.

| operation | written here | where |
|---|---|---|
| `linear` | `products`: oneDNN instead of MKL | on an AMD CPU with AVX-512, for large products in fp32 |
| `add_norm`, `rms_norm` | `norm`: sum, norm and their gradients in one pass | on a CPU, where a gradient is wanted |
| `split_heads` | `heads`: norm and rotation of all heads in one pass | everywhere |
| `swiglu` | `swiglu`: gradients go straight to where they belong | everywhere |
| `packed_attention` | `cpu_attention`: torch's fused kernel, in one piece for a batch | on a CPU |
| | `varlen_attention`: one kernel for all documents | on a GPU that has the kernel for these heads |
| | `flex_attention`: torch's FlexAttention | on a GPU, where `trainer.model.attn` is "flex" |
| `partial_attention` | torch's flash kernels, whose log-sum-exp they give | on a CPU, and on such a GPU |

Elsewhere it is torch's own (`plain`), and so it is everywhere under torch.compile, which fuses such chains by itself.

T tokens, N rows, H query heads, K key/value heads, D last dim or head size, I intermediate size, M outputs.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from ductile.host import is_amd_with_avx512
from ductile.kernels import cpu_attention, norm, plain, products, varlen_attention
from ductile.kernels.heads import split_heads as split_heads_by_hand
from ductile.kernels.partial_attention import (
    CPU_FLASH,
    PLAIN,
    ChunkedAttention,
    PartialAttention,
    VarlenPartialAttention,
)
from ductile.kernels.swiglu import swiglu as swiglu_by_hand
from ductile.kernels.trees import Tree

ONEDNN_SMALLEST = 1 << 21
"""N x K x M of a product from which oneDNN is faster: a call of it takes 10 us longer to begin."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K], weight [M, K], bias [M] -> x weight^T + bias, [N, M]."""
    return (products.linear if _is_for_onednn(x, weight) else F.linear)(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> weight * x / sqrt(mean(x^2) + eps), the mean over D. Computed in fp32 or more; the
    result has x's dtype."""
    return add_norm(x, None, weight, eps)[1]


def add_norm(x: Tensor, change: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and `change` [..., D] -> x + change, and its `rms_norm`. Without a change x itself, and its norm."""
    by_hand = x.requires_grad and x.device.type == "cpu" and not is_compiling()
    return (norm.add_norm if by_hand else plain.add_norm)(x, change, weight, eps)


def split_heads(
    qkv: Tensor, heads: tuple[int, int, int], weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, (H + 2 K) D], `heads` (H, K, K) -> q [T, H, D], k and v [T, K, D]; q and k normalised and turned.

    `weight` [H + K, D] is that of the norm over each query and key head; None where the model has no such norm. cos and
    sin are those of `model.rope.Rope`. The arithmetic is fp32 or more, whatever qkv is.
    """
    return (plain.split_heads if is_compiling() else split_heads_by_hand)(qkv, heads, weight, eps, cos, sin)


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] -> silu(gate) * up [T, I], where gate, up = gate_up.chunk(2, dim=-1)."""
    return (plain.swiglu if is_compiling() else swiglu_by_hand)(gate_up)


@dataclass(slots=True)
class AttentionChoice:
    """Kernel that `trainer.model.attn` has chosen for this process."""

    flex: bool = False

    def choose(self, flex: bool) -> None:
        self.flex = flex


CHOICE = AttentionChoice()

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of the batch that it was made for: q [T, H, D], k and v [T, K, D] -> [T, H, D]."""


def packed_attention(trees: Sequence[Tree], q: Tensor) -> tuple[AttentionFunction, str]:
    """Attention of a batch with such queries [T, H, D], in all layers, and which one it is, in words."""
    if is_compiling():
        reason = "torch compiles"
    elif CHOICE.flex:
        from ductile.kernels.flex_attention import FlexAttention  # loads torch's compiler: only where it is used

        return FlexAttention(trees, q.device), "torch's FlexAttention, once a layer"
    elif q.device.type == "cpu":
        calls = list(cpu_attention.calls(trees))
        return partial(cpu_attention.attend, calls=calls), "torch's fused kernel, on a CPU"
    else:
        reason = varlen_attention.why_not(q.dtype, q.shape[2], varlen_attention.capability_of(q.device))
        if not reason:
            return varlen_attention.VarlenAttention(trees, q.device), "one variable-length kernel a layer"
        tell(f"attention is one call a document and layer: {reason}")
    return partial(plain.attention, trees), f"one call a document and layer: {reason}"


def partial_attention(lengths: Sequence[int], q: Tensor) -> PartialAttention:
    """Attention of chunks of these lengths to as many keys, with such queries [S, H, D], in all layers."""
    if q.device.type == "cpu":
        return ChunkedAttention(lengths, CPU_FLASH)
    reason = varlen_attention.why_not(q.dtype, q.shape[2], varlen_attention.capability_of(q.device))
    if not reason:
        return VarlenPartialAttention(lengths, q.device)
    tell(f"attention to a part of the keys holds all scores of a chunk: {reason}")
    return ChunkedAttention(lengths, PLAIN)


@cache
def tell(sentence: str) -> None:
    """Write the sentence to the slot's log, once."""
    print(sentence, file=sys.stderr)


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        not is_compiling()  # first: what is asked of sizes is asked of them in compiled code, too
        and x.numel() * weight.shape[0] >= ONEDNN_SMALLEST
        and x.dim() == 2
        and len(x) >= products.BLOCKS[-1]
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and onednn_is_faster()
        and not torch.is_autocast_enabled("cpu")
    )


@cache
def onednn_is_faster() -> bool:
    """Return whether this processor is one on which MKL is the slower library."""
    return is_amd_with_avx512() and torch.backends.mkldnn.is_available()
