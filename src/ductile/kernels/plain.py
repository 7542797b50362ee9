"""Operations of the model in plain torch: for torch.compile, for devices and formats that no kernel here is for, and
for parallel forms that split them. `ductile.kernels.dispatch` says what each of them is, and chooses.

T tokens, H query heads, K key/value heads, D head size, I intermediate size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from ductile.kernels.trees import Tree


def add_norm(x: Tensor, change: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x if change is None else x + change
    return total, F.rms_norm(total, weight.shape, weight, eps)


def split_heads(
    qkv: Tensor, heads: tuple[int, int, int], weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.view(-1, sum(heads), cos.shape[-1]).split(heads, dim=1)
    qk = torch.cat((q, k), dim=1).to(wide_type(qkv))
    if weight is not None:
        qk = F.rms_norm(qk, qk.shape[-1:], eps=eps) * weight
    q, k = rotate(qk, cos, sin).to(qkv.dtype).split(heads[:2], dim=1)
    return q, k, v


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """x [T, H, D], fp32 -> the same, turned by rotary angles; into `out`, of any type, where there is one."""
    partner = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, partner, sin, out=out)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def attention(trees: Sequence[Tree], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, H, D], k and v [T, K, D] -> [T, H, D]: one call of torch's kernel for each stem, and for each branch, which
    finds the stem's keys before its own."""
    grouped = q.shape[1] != k.shape[1]
    outputs: list[Tensor] = []
    for tree in trees:
        stem = slice(tree.start, tree.stem)
        if tree.stem > tree.start:
            qkv = _heads_first(q[stem], k[stem], v[stem])
            outputs.append(F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=grouped))
        for start, end in tree.branches:
            if end > start:
                keys, values = (torch.cat((x[stem], x[start:end])) for x in (k, v))
                mask = causal_lower_right(end - start, len(keys))
                qkv = _heads_first(q[start:end], keys, values)
                outputs.append(F.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=grouped))
    return torch.cat([output[0].transpose(0, 1) for output in outputs])


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def wide_type(x: Tensor) -> torch.dtype:
    """The dtype in which values of x are added up: fp32 or more."""
    return torch.promote_types(x.dtype, torch.float32)
