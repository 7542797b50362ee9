"""The turn of rotary position embeddings. T tokens, H heads, D head size."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """x [T, H, D], fp32 -> the same, turned; into `out`, of any type, where there is one."""
    partner = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, partner, sin, out=out)
