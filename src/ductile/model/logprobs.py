"""A head that scores chosen tokens: log-prob and entropy, without ever holding all logits.

Only the rows that are asked for are multiplied with the output embeddings, a chunk of rows at a time; the backward
pass makes each chunk's probabilities again, unless there is only one chunk. N rows, M hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ductile.kernels.blocks import blocks
from ductile.kernels.dispatch import linear

CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 27}
"""Most logits of a chunk, by kind of device, when `chunk_tokens` is not given: 128 MiB in fp32; on a GPU 512 MiB, of
which the backward pass has three and a half at a time, 1.75 GiB.

For each chunk the weight's gradient, [V, M] in fp32, is read and written: for the 151,936 x 2,560 of Qwen3-4B 3 GB, by
its data sheet a millisecond of an H100. The products of the 220 rows that 2^25 logits have take no longer than that;
those of the 883 rows of 2^27 four times as long.
"""


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Says that the weight's rows are a part of the vocabulary, maybe none of it."""

    has_target: Tensor
    """[N] bool: whether the part has the token to score. Where it has not, `LogprobHead.targets` names any row."""
    over_all: Callable[[Tensor], Tensor]
    """Function of what the part says of each token: its target's logit, or 0; the log of the summed exponentials of its
    logits; their mean, weighed by probability. [3, N] -> [3, N], the same over the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class LogprobHead:
    """Called by the model as `head(hidden [T, M], weight [V, M])`; returns fp32 log-probs [N] and entropies [N].

    Both have gradients; that of the entropies costs nothing where they are only looked at.
    """

    rows: Tensor
    """[N] int64: the position before each token to score, as a hidden state speaks about the next token."""
    targets: Tensor
    """[N] int64: the tokens to score."""
    temperatures: Tensor | None = None
    """[N] fp32: what the logits of each row are divided by; None means 1."""
    chunk_tokens: int | None = None
    """Tokens that are scored at a time; None: `tokens_of_chunk`."""
    fp32: bool = False
    """Hidden states and weight, numbers of 16 bits maybe, are multiplied as fp32 ones, and so are their gradients: no
    logit is rounded to 16 bits."""
    part: VocabularyPart | None = None
    """The part of the vocabulary that V rows are; None: all of it."""

    def __call__(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        size = self.chunk_tokens or tokens_of_chunk(weight.device.type, len(weight))
        scored = (self.rows, self.targets, self.temperatures)
        if self.fp32:
            hidden, weight = hidden.float(), weight.float()
        return _ChosenLogprobs.apply(hidden, weight, *scored, size, self.part)  # pyright: ignore


def tokens_of_chunk(device_type: str, vocab_size: int) -> int:
    """Tokens of a chunk: as many as have `CHUNK_ELEMENTS` logits."""
    return max(1, CHUNK_ELEMENTS[device_type] // max(1, vocab_size))


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        all_hidden: Tensor,
        weight: Tensor,
        chosen: Tensor,
        targets: Tensor,
        temperatures: Tensor | None,
        chunk_tokens: int,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor]:
        hidden = all_hidden[chosen]
        chunks = _chunks(hidden, weight, chunk_tokens)
        scores = torch.zeros(3, len(hidden), device=hidden.device)
        target_logits, log_totals, mean_logits = scores
        if not len(weight):
            log_totals.fill_(-inf)
        kept = None
        for rows in chunks:
            logits = _logits(hidden, weight, temperatures, rows)
            kept = torch.empty_like(logits)
            in_rows = (targets, target_logits, log_totals, mean_logits)
            for of_rows, probabilities, target, target_logit, log_total, mean_logit in blocks(
                logits, kept, *(each[rows, None] for each in in_rows)
            ):
                torch.gather(of_rows, 1, target, out=target_logit)
                torch.logsumexp(of_rows, -1, keepdim=True, out=log_total)
                torch.sub(of_rows, log_total, out=probabilities).exp_()
                torch.sum(of_rows.mul_(probabilities), -1, keepdim=True, out=mean_logit)
        kept = kept if len(chunks) == 1 else None
        has_target = None
        if part is not None:
            has_target = part.has_target
            target_logits.mul_(has_target)
            of_part = log_totals
            target_logits, log_totals, mean_logits = part.over_all(scores)
            if kept is not None:
                kept.mul_((of_part - log_totals).exp_()[:, None])
        entropies = log_totals - mean_logits
        ctx.save_for_backward(hidden, weight, chosen, targets, temperatures, log_totals, entropies, has_target, kept)
        ctx.num_hidden, ctx.chunk_tokens = len(all_hidden), chunk_tokens
        ctx.set_materialize_grads(False)
        return target_logits - log_totals, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None, None, None]:
        hidden, weight, chosen, targets, temperatures, log_totals, entropies, has_target, kept = ctx.saved_tensors
        grad = torch.zeros_like(entropies) if of_logprobs is None else of_logprobs
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        if temperatures is not None:
            grad = grad / temperatures
            of_entropies = None if of_entropies is None else of_entropies / temperatures
        at_target = grad if has_target is None else grad * has_target
        for rows in _chunks(hidden, weight, ctx.chunk_tokens):
            # d logprob / d logits = onehot(target) - probabilities
            probabilities = kept
            if probabilities is None:
                probabilities = _logits(hidden, weight, temperatures, rows).sub_(log_totals[rows, None]).exp_()
            grad_logits = probabilities * -grad[rows, None]
            grad_logits.scatter_add_(1, targets[rows, None], at_target[rows, None])
            if of_entropies is not None:
                # d entropy / d logits = -p (log p + entropy)
                surprise = torch.xlogy(probabilities, probabilities).addcmul_(probabilities, entropies[rows, None])
                grad_logits.addcmul_(surprise, of_entropies[rows, None], value=-1)
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden[rows] = linear(grad_logits, weight.t())
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[rows]
        # A row may speak about several tokens: the first ones of all completions of a prompt.
        grad_all = hidden.new_zeros((ctx.num_hidden, hidden.shape[1])).index_add_(0, chosen, grad_hidden)
        return grad_all, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None


def _chunks(hidden: Tensor, weight: Tensor, size: int) -> list[slice]:
    """Rows of each chunk; none where there is nothing to compare with."""
    num_rows = len(hidden) if len(weight) else 0
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _logits(hidden: Tensor, weight: Tensor, temperatures: Tensor | None, rows: slice) -> Tensor:
    """[rows, V] in fp32, a fresh tensor."""
    logits = linear(hidden[rows], weight).float()
    return logits if temperatures is None else logits.div_(temperatures[rows, None])
