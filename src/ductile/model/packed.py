"""Samples laid out for one forward pass: documents one after the other, and which tokens are scored."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ductile.model.attention import PackedAttention
from ductile.model.logprobs import LogprobHead
from ductile.model.transformer import Transformer
from ductile.records import Sample


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """T tokens of all samples; N of them, those with mask true, are scored, in order."""

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64, from 0 in each sample"""
    lengths: tuple[int, ...]
    """Tokens of each sample, together T."""
    scored: Tensor
    """[N] int64: where in the T tokens the scored ones are."""
    temperatures: Tensor | None
    """[N] fp32; None when all are 1."""

    @classmethod
    def of(cls, samples: Sequence[Sample], device: str | torch.device = "cpu") -> "PackedSamples":
        mask = torch.tensor([trained for sample in samples for trained in sample.mask], dtype=torch.bool)
        scored = mask.nonzero()[:, 0]
        temperatures = None
        if any(sample.temperature != 1.0 for sample in samples):
            a_token = [torch.full((len(sample),), sample.temperature) for sample in samples]
            temperatures = torch.cat(a_token)[scored].to(device)
        return cls(
            token_ids=torch.tensor(list(chain.from_iterable(sample.token_ids for sample in samples)), device=device),
            positions=torch.cat([torch.arange(len(sample)) for sample in samples]).to(device),
            lengths=tuple(len(sample) for sample in samples),
            scored=scored.to(device),
            temperatures=temperatures,
        )

    def score(self, model: Transformer) -> tuple[Tensor, Tensor]:
        """Log-probs [N] (with gradient, if enabled) and entropies [N] of the scored tokens."""
        head = LogprobHead(self.scored - 1, self.token_ids[self.scored], self.temperatures)
        return model(self.token_ids, self.positions, PackedAttention(self.lengths), head)
