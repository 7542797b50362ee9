"""Distributions against a reference that is written for one row, in the words of the definition."""

import math

import numpy as np
import pytest
import torch

from ductile.generator.engine.sampler import inverse_cdf, keep_likeliest, sample, stream_key, uniforms
from ductile.records import Sampling


def reference(logits: list[float], sampling: Sampling) -> list[float]:
    """The processed distribution of one row."""
    scaled = [x / (sampling.temperature or 1.0) for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    total = sum(math.exp(scaled[i]) for i in order)
    probs = {i: math.exp(scaled[i]) / total for i in order}
    kept, before = [], 0.0
    for i in order:
        if kept and (before >= sampling.top_p or probs[i] < sampling.min_p * probs[order[0]]):
            break
        kept.append(i)
        before += probs[i]
    total = sum(probs[i] for i in kept)
    return [probs[i] / total if i in kept else 0.0 for i in range(len(logits))]


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0),
    Sampling(top_k=1),
    Sampling(top_k=3),
    Sampling(top_k=1000),
    Sampling(top_p=0.6),
    Sampling(top_p=1e-9),
    Sampling(min_p=0.3),
    Sampling(min_p=1.0),
    Sampling(temperature=0.7, top_k=5, top_p=0.8, min_p=0.05),
    Sampling(temperature=1.5, top_k=6, min_p=0.2),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_draws_follow_the_processed_distribution(sampling: Sampling) -> None:
    num = 20_000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 2
    expected = reference(logits.tolist(), sampling)
    tokens, logprobs = sample(logits.expand(num, -1), [sampling] * num, [stream_key(3, 0, "")] * num, range(num))
    counts = np.bincount(tokens.numpy(), minlength=12)
    possible = [i for i, p in enumerate(expected) if p > 0]
    assert counts.sum() == counts[possible].sum(), "a token that was left out is drawn"
    # Pearson's chi-square over what is expected at least five times; its mean is the number of cells less one, its
    # variance twice that. The numbers are always the same, so this does not fail by chance.
    cells = [i for i in possible if expected[i] * num >= 5]
    chi_square = sum((counts[i] - expected[i] * num) ** 2 / (expected[i] * num) for i in cells)
    assert chi_square < len(cells) + 5 * math.sqrt(2 * len(cells))
    whole = reference(logits.tolist(), Sampling(temperature=sampling.temperature))
    for token, logprob in set(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
        assert logprob == pytest.approx(math.log(whole[token]), abs=1e-5)


def test_rows_of_one_batch_keep_their_own_settings() -> None:
    logits = torch.randn(len(SAMPLINGS) + 1, 12, generator=torch.Generator().manual_seed(2))
    samplings = [*SAMPLINGS, Sampling(temperature=0.0)]
    streams = [stream_key(i, 0, "") for i in range(len(samplings))]
    tokens, logprobs = sample(logits, samplings, streams, [9] * len(samplings))
    for i, sampling in enumerate(samplings):
        token, logprob = sample(logits[i : i + 1], [sampling], streams[i : i + 1], [9])
        assert (token.item(), logprob.item()) == (tokens[i].item(), pytest.approx(logprobs[i].item(), abs=1e-6))
    assert tokens[-1] == logits[-1].argmax()
    assert logprobs[-1].item() == pytest.approx(logits[-1].log_softmax(-1).max().item())


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_what_is_kept(sampling: Sampling) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0, 0.5, 2.0, 2.9, -5.0]])
    kept = keep_likeliest(logits / sampling.temperature, [sampling]).isfinite()[0].tolist()
    assert kept == [p > 0 for p in reference(logits[0].tolist(), sampling)]


def test_bfloat16_logits_are_treated_in_fp32() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens, logprobs = sample(logits, [Sampling()], [1], [0])
    assert logprobs.dtype == torch.float32
    assert logprobs[0] == logits.float().log_softmax(-1)[0, tokens[0]]


def test_uniforms_are_splitmix64() -> None:
    """The first outputs of the published generator, seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    expected = [(value >> 11) * 2.0**-53 for value in published]
    assert uniforms([1234567] * 4, range(4)).tolist() == expected


def test_streams() -> None:
    assert stream_key(1, 0, "a") == stream_key(1, 5, "b"), "a seed alone decides"
    unseeded = {stream_key(None, seed, id) for seed in (0, 1) for id in ("a", "b")}
    assert len(unseeded) == 4


def test_the_extreme_numbers_draw_the_first_and_the_last_possible_token() -> None:
    logprobs = torch.tensor([[-torch.inf, 0.0, 0.0, 0.0, -torch.inf]]).log_softmax(-1)
    assert inverse_cdf(logprobs, np.array([0.0])).item() == 1
    assert inverse_cdf(logprobs, np.array([1 - 2.0**-53])).item() == 3
