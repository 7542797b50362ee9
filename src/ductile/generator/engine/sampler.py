"""Turns logits into the next tokens and their log-probs. N sequences, V vocabulary.

Temperature first, then top-k, then top-p over what top-k kept, then min-p; each keeps the likeliest tokens, so what is
left is a beginning of the sorted vocabulary, and its length is the smallest of the three.

The reported log-prob is `log_softmax(logits / temperature)`, over the whole vocabulary also where top-k, top-p or min-p
left tokens out: the number that the trainer recomputes, so that the same weights give the same one, and a loss sees how
far the policy has moved since, not how much was cut off. Greedy tokens report temperature 1.

Randomness has no state: the number for a token is a function of its sequence's stream and its position in the
completion. So it depends neither on what else runs in the batch nor on where the sequence ran before.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ductile.records import Sampling


def stream_key(seed: int | None, engine_seed: int, request_id: str) -> int:
    """64 bits. Requests without a seed get one from the engine's seed and their id."""
    text = f"seed {seed}" if seed is not None else f"engine {engine_seed} request {request_id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(streams: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """[N] float64 in [0, 1): splitmix64 of each stream at its position."""
    z = np.array(streams, dtype=np.uint64) + (np.array(positions, dtype=np.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 11).astype(np.float64) * 2.0**-53


def sample(
    logits: Tensor, samplings: Sequence[Sampling], streams: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`logits` [N, V] -> tokens [N] int64 and log-probs [N] fp32. `positions` count each completion's tokens from 0."""
    return draw(all_logprobs(logits, samplings), samplings, streams, positions)


def all_logprobs(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """[N, V] -> log-probs [N, V] fp32 at each request's temperature, of the whole vocabulary."""
    logits = logits.float()
    if any(s.temperature not in (0.0, 1.0) for s in samplings):
        logits = logits / logits.new_tensor([s.temperature or 1.0 for s in samplings])[:, None]
    return logits.log_softmax(-1)


def draw(
    logprobs: Tensor, samplings: Sequence[Sampling], streams: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`all_logprobs` [N, V] -> tokens [N] int64 and their log-probs [N]."""
    greedy = [s.temperature == 0.0 for s in samplings]
    if all(greedy):
        chosen, tokens = logprobs.max(-1)
        return tokens, chosen
    candidates = logprobs
    filtered = [i for i, s in enumerate(samplings) if s.temperature and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)]
    if filtered:
        rows = torch.tensor(filtered, device=logprobs.device)
        kept = keep_likeliest(logprobs[rows], [samplings[i] for i in filtered])
        candidates = logprobs.index_copy(0, rows, kept)
    tokens = inverse_cdf(candidates, uniforms(streams, positions))
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=tokens.device), logprobs.max(-1).indices, tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def keep_likeliest(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """[N, V] with -inf where top-k, top-p or min-p leaves a token out. Of equal logits the smaller id goes first."""
    vocab_size = logits.shape[1]
    column = logits.new_tensor
    top_k = column([s.top_k if 0 < s.top_k < vocab_size else vocab_size for s in samplings], dtype=torch.int64)
    top_p, min_p = column([s.top_p for s in samplings]), column([s.min_p for s in samplings])
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    kept = torch.arange(vocab_size, device=logits.device) < top_k[:, None]
    probs = values.masked_fill(~kept, -torch.inf).softmax(-1)
    before = probs.cumsum(-1, dtype=torch.float64) - probs
    kept &= (before < top_p[:, None]) | (top_p[:, None] >= 1)
    kept &= probs >= min_p[:, None] * probs[:, :1]
    kept[:, 0] = True
    return torch.full_like(logits, -torch.inf).scatter(1, order, values.masked_fill(~kept, -torch.inf))


def inverse_cdf(logprobs: Tensor, numbers: np.ndarray) -> Tensor:
    """The first token at which the cumulated probability exceeds the number: never one of probability zero.

    The probabilities need not add up to 1; the number is a share of their sum.
    """
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
    targets = torch.from_numpy(numbers).to(cdf.device)[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, targets, right=True)[:, 0].clamp(max=logprobs.shape[1] - 1)
