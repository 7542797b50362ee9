"""Samples laid out for one forward pass: documents one after the other, and which tokens are scored.

Only what a scored token can see is run: nothing after the last one, and not that one itself. Samples that begin alike,
such as the completions of one prompt, share their beginning: it is run once, and what differs branches off.

    samples   a b C D     a b E F G     h I          (scored tokens are capitals)
    tokens    a b | C | E F | h                      stem `a b` with branches `C` and `E F`; stem `h`
    rows      1 2 1 3 4 5                            whose hidden states say C D, E F G, I
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress

import torch
from torch import Tensor

from ductile.core.layout.flops import ForwardWork
from ductile.model.attention import PackedAttention
from ductile.model.logprobs import LogprobHead
from ductile.model.transformer import Transformer
from ductile.records import Sample


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """T tokens to run; N tokens to score, sample by sample, in order."""

    token_ids: Tensor
    """[T] int64: the tokens to run."""
    positions: Tensor
    """[T] int64: position of each token in its sample, from 0."""
    stems: tuple[int, ...]
    """Length of each document, or of the beginning that several documents share, in tokens."""
    branches: tuple[tuple[int, ...], ...]
    """Lengths of the branches of each stem, in tokens; together with the stems they add up to T."""
    rows: Tensor
    """[N] int64: which of the T tokens comes before the scored one."""
    targets: Tensor
    """[N] int64: the scored tokens."""
    temperatures: Tensor | None
    """[N] fp32: sampling temperature of each scored token; None when all are 1."""

    @classmethod
    def of(cls, samples: Sequence[Sample], device: str | torch.device = "cpu") -> "PackedSamples":
        token_ids: list[int] = []
        positions: list[int] = []
        stems: list[int] = []
        branches: list[tuple[int, ...]] = []
        rows: list[list[int]] = [[] for _ in samples]

        def lay(sample: Sample, start: int, end: int) -> None:
            token_ids.extend(sample.token_ids[start:end])
            positions.extend(range(start, end))

        for prompt, members in _by_prompt(samples).items():
            ends = [_num_seen(samples[index]) for index in members]
            stem = len(prompt) if len(members) > 1 else ends[0]
            stem_at = len(token_ids)
            lay(samples[members[0]], 0, stem)
            for index, end in zip(members, ends, strict=True):
                # Where token 0 of the sample would be, if its branch did not begin later.
                branch_at = len(token_ids) - stem
                lay(samples[index], stem, end)
                preceding = (token - 1 for token, scored in enumerate(samples[index].loss_mask) if scored)
                rows[index] = [(stem_at if token < stem else branch_at) + token for token in preceding]
            stems.append(stem)
            branches.append(tuple(end - stem for end in ends if end > stem))
        temperatures = None
        if any(sample.temperature != 1.0 for sample in samples):
            each = [torch.full((sum(sample.loss_mask),), sample.temperature) for sample in samples]
            temperatures = torch.cat(each).to(device)
        scored = chain.from_iterable(compress(sample.token_ids, sample.loss_mask) for sample in samples)
        tokens, places, before, targets = (
            torch.tensor(values, dtype=torch.int64, device=device)
            for values in (token_ids, positions, list(chain.from_iterable(rows)), list(scored))
        )
        return cls(tokens, places, tuple(stems), tuple(branches), before, targets, temperatures)

    @property
    def work(self) -> ForwardWork:
        """What running the T tokens, and scoring the N tokens, asks of a model."""
        return ForwardWork.of(self.stems, self.branches, len(self.targets))

    def score(self, model: Transformer, chunk_tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs [N] (with gradient, if enabled) and entropies [N] of the scored tokens.

        chunk_tokens: see `LogprobHead`.
        """
        head = LogprobHead(self.rows, self.targets, self.temperatures, chunk_tokens)
        return model(self.token_ids, self.positions, PackedAttention(self.stems, self.branches), head)


def _by_prompt(samples: Sequence[Sample]) -> dict[tuple[int, ...], list[int]]:
    """The tokens before the first scored one, and the indices of the samples that begin with them."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        if any(sample.loss_mask):
            found.setdefault(sample.token_ids[: sample.loss_mask.index(True)], []).append(index)
    return found


def _num_seen(sample: Sample) -> int:
    """Tokens before the last scored one."""
    return len(sample) - 1 - sample.loss_mask[::-1].index(True)
