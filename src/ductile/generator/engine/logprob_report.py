"""Log-probs that only some clients ask for: the likeliest tokens at each place, and those of the prompt.

A request that asks has a `LogprobReport`, which the engine fills while it computes. Nothing is computed for the others:
no logits of prompts, no sorting.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ductile.kernels.dispatch import linear
from ductile.model.logprobs import tokens_of_chunk

Likeliest = list[tuple[int, float]]
"""Tokens and their log-probs, the likeliest first."""


@dataclass(eq=False, slots=True)
class LogprobReport:
    """A choice that a client asks for, as far as it has come."""

    num_likeliest: int
    with_prompt: bool
    prompt: list[tuple[float, Likeliest]] = field(default_factory=list[tuple[float, Likeliest]])
    """Log-prob of each prompt token but the first, at temperature 1, and the likeliest tokens in its place."""
    completion: list[Likeliest] = field(default_factory=list[Likeliest])
    """The likeliest tokens at each place of the completion, by the distribution that the sampled token's log-prob is
    of."""

    def score_prompt(self, prompt: Sequence[int], start: int, hidden: Tensor, weight: Tensor) -> None:
        """Take what a step computes of the prompt: `hidden` [T, M] are the last hidden states of the tokens from
        `start` on, `weight` [V, M] the output embeddings."""
        # Of tokens that are computed again, as their blocks were taken, the log-probs are here already.
        end = min(start + len(hidden), len(prompt) - 1)
        size = tokens_of_chunk(weight.device.type, len(weight))
        for first in range(max(start, len(self.prompt)), end, size):
            last = min(first + size, end)
            logprobs = linear(hidden[first - start : last - start], weight).float().log_softmax(-1)
            targets = torch.tensor(list(prompt[first + 1 : last + 1]), device=logprobs.device)
            chosen = logprobs.gather(1, targets[:, None])[:, 0].tolist()
            self.prompt += zip(chosen, _likeliest(logprobs, self.num_likeliest), strict=True)


def take_likeliest(reports: Sequence[LogprobReport | None], logprobs: Tensor) -> None:
    """Add the next place of each completion to its report. `logprobs` [N, V] are those of the N next tokens."""
    asking = [(row, report) for row, report in enumerate(reports) if report is not None]
    if not asking:
        return
    rows = torch.tensor([row for row, _ in asking], device=logprobs.device)
    likeliest = _likeliest(logprobs[rows], max(report.num_likeliest for _, report in asking))
    for (_, report), found in zip(asking, likeliest, strict=True):
        report.completion.append(found[: report.num_likeliest])


def _likeliest(logprobs: Tensor, number: int) -> list[Likeliest]:
    """The likeliest tokens of each row of [N, V]."""
    values, tokens = logprobs.topk(min(number, logprobs.shape[1]))
    return [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]
