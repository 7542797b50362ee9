"""Rotary position embeddings: each pair of a head's coordinates turns with the position, slower for later pairs.

Pairs are (i, i + D/2), as in the Hugging Face checkpoints. T tokens, H heads, D head size.
"""

import math

import torch
from torch import Tensor

from ductile.core.layout.model.spec import ModelSpec, RopeScaling


class Rope:
    """Turns positions into angles. It has no parameters or buffers, so that meta devices and `.to(dtype)` leave it
    be."""

    def __init__(self, spec: ModelSpec) -> None:
        self._frequencies = {torch.device("cpu"): frequencies(spec)}

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`positions` [T] -> cos and sin, each [T, 1, D], fp32. The first half of sin is negated, for
        `kernels.plain.rotate`."""
        device = positions.device
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        angles = (positions.float()[:, None] * self._frequencies[device])[:, None, :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def frequencies(spec: ModelSpec) -> Tensor:
    """[D/2] radians per position, fp32 on the CPU."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64, device="cpu").float() / spec.head_dim
    plain = 1.0 / spec.rope_theta**exponents
    if spec.rope_scaling is None:
        return plain
    is_linear = spec.rope_scaling.kind == "linear"
    return plain / spec.rope_scaling.factor if is_linear else _llama3(plain, spec.rope_scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Waves that fit often into the original context stay, waves longer than it are stretched, in between both mix."""
    waves_in_context = scaling.original_max_position * plain / (2 * math.pi)
    kept = (waves_in_context - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / scaling.factor
