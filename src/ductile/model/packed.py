"""Samples laid out for one forward pass: documents one after the other, and which tokens are scored.

Only what a scored token can see is run: nothing after the last one, and not that one itself. Samples that begin alike,
such as the completions of one prompt, share their beginning: it is run once, and what differs branches off.

    samples   a b C D     a b E F G     h I          (scored tokens are capitals)
    tokens    a b | C | E F | h                      stem `a b` with branches `C` and `E F`; stem `h`
    rows      1 2 1 3 4 5                            whose hidden states say C D, E F G, I
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ductile.core.layout.model.flops import ForwardWork
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
        token_ids: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        stems: list[int] = []
        branches: list[tuple[int, ...]] = []
        rows: list[np.ndarray] = [np.empty(0, np.int64) for _ in samples]
        scored = [np.flatnonzero(sample.loss_mask.array) for sample in samples]
        """Places of each sample's scored tokens."""
        num_laid = 0

        def lay(sample: Sample, start: int, end: int) -> None:
            nonlocal num_laid
            token_ids.append(sample.token_ids.array[start:end])
            positions.append(np.arange(start, end))
            num_laid += end - start

        for members in _by_prompt(samples):
            ends = [int(scored[index][-1]) for index in members]  # what the last scored token sees
            stem = int(scored[members[0]][0]) if len(members) > 1 else ends[0]
            stem_at = num_laid
            lay(samples[members[0]], 0, stem)
            for index, end in zip(members, ends, strict=True):
                # Where token 0 of the sample would be, if its branch did not begin later.
                branch_at = num_laid - stem
                lay(samples[index], stem, end)
                before = scored[index] - 1
                rows[index] = before + np.where(before < stem, stem_at, branch_at)
            stems.append(stem)
            branches.append(tuple(end - stem for end in ends if end > stem))
        temperatures = None
        if any(sample.temperature != 1.0 for sample in samples):
            each = [torch.full((sample.num_trained,), sample.temperature) for sample in samples]
            temperatures = torch.cat(each).to(device)
        targets = [sample.token_ids.array[places] for sample, places in zip(samples, scored, strict=True)]
        as_tensor = [
            torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts])).to(device)
            for parts in (token_ids, positions, rows, targets)
        ]
        return cls(as_tensor[0], as_tensor[1], tuple(stems), tuple(branches), as_tensor[2], as_tensor[3], temperatures)

    def padded(self, num_tokens: int) -> "PackedSamples":
        """The same samples, and behind them a document of token 0 in which nothing is scored, so that there are
        `num_tokens` to run. Raises ValueError where there are more already."""
        missing = num_tokens - len(self.token_ids)
        if missing < 0:
            raise ValueError(f"{len(self.token_ids)} tokens cannot be padded to {num_tokens}")
        if not missing:
            return self
        return replace(
            self,
            token_ids=torch.cat((self.token_ids, self.token_ids.new_zeros(missing))),
            positions=torch.cat((self.positions, torch.arange(missing, device=self.positions.device))),
            stems=(*self.stems, missing),
            branches=(*self.branches, ()),
        )

    def unshared(self, multiple: int = 1) -> "PackedSamples":
        """The same samples, where each branch of a stem is a document of its own, which begins with the stem's tokens.
        Token 0 fills each document up to a multiple of `multiple` tokens.

        What a token of a stem says is scored in the first of the documents that have it.
        """
        documents = [
            np.concatenate((np.arange(tree.start, tree.stem), np.arange(*branch)))
            for tree in PackedAttention(self.stems, self.branches).trees
            for branch in tree.branches or [(tree.stem, tree.stem)]
        ]
        """Which of the T tokens each document has."""
        lengths = tuple(-(-len(document) // multiple) * multiple for document in documents)
        starts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
        nothing = np.empty(0, np.int64)
        before = np.concatenate((nothing, *documents))
        after = np.concatenate(
            (nothing, *(start + np.arange(len(each)) for start, each in zip(starts, documents, strict=True)))
        )
        place = np.empty(len(self.token_ids), np.int64)
        place[before[::-1]] = after[::-1]  # of several places the last one stays: that of the first document
        positions = np.concatenate((nothing, *map(np.arange, lengths)))
        device = self.token_ids.device
        before, after, place, positions = (torch.from_numpy(x).to(device) for x in (before, after, place, positions))
        return replace(
            self,
            token_ids=self.token_ids.new_zeros(len(positions)).index_copy_(0, after, self.token_ids[before]),
            positions=positions,
            stems=lengths,
            branches=((),) * len(lengths),
            rows=place[self.rows],
        )

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


def _by_prompt(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of the samples that have a scored token; those with the same tokens before the first are one list."""
    found: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        if (prompt := sample.prompt) is not None:
            found.setdefault(prompt.array.tobytes(), []).append(index)
    return [*found.values()]
