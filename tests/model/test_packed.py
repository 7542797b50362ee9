"""Samples that share their beginning against each one on its own."""

import pytest
import torch
from torch import Tensor

from ductile.model.attention import PackedAttention
from ductile.model.checkpoint import load_model
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.records import Sample
from tests.tiny import make_model_folder

A, B = (10, 11, 12), (20,)
"""Two prompts."""
SAMPLES = [
    Sample((*A, 30, 31, 32), (False,) * 3 + (True,) * 3),
    Sample((*B, 40), (False, True)),
    Sample((*A, 33), (False,) * 3 + (True,), temperature=0.5),
    Sample((*A, 30, 34, 35, 36), (False,) * 3 + (True, False, True, False)),  # another's words, and a tail
    Sample((*B, 41, 42), (False, True, True)),
    Sample((50, 51, 52), (False, False, False)),
    Sample((*A, 30, 31, 32), (False,) * 3 + (True,) * 3),  # the same completion again
    Sample((*A, 37, 38), (False,) * 4 + (True,)),  # begins like the others, but its first word is not ours
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return load_model(make_model_folder(tmp_path_factory.mktemp("model"), "qwen3"))


def dumb(model: Transformer, sample: Sample) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of one sample's scored tokens, from all its logits."""
    tokens, mask = torch.tensor(sample.token_ids), torch.tensor(sample.loss_mask)[1:]
    logits = model(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)])) / sample.temperature
    logprobs = logits[:-1].log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, tokens[1:, None])[:, 0][mask], entropies[mask]


def gradients(model: Transformer, logprobs: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(logprobs, parameters, upstream), strict=True))


def test_every_number_and_gradient_is_that_of_each_sample_alone(model: Transformer) -> None:
    logprobs, entropies = PackedSamples.of(SAMPLES).score(model)
    each = [dumb(model, sample) for sample in SAMPLES]
    expected = torch.cat([of_sample for of_sample, _ in each])
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies, torch.cat([of_sample for _, of_sample in each]), atol=1e-5, rtol=1e-5)
    upstream = torch.randn(len(logprobs))
    ours, theirs = gradients(model, logprobs, upstream), gradients(model, expected, upstream)
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).norm() <= 1e-5 * theirs[name].norm(), name


def test_a_shared_prompt_is_run_once_and_nothing_after_the_last_scored_token() -> None:
    packed = PackedSamples.of(SAMPLES)
    tokens = packed.token_ids.tolist()
    assert tokens.count(12) == 2  # the sample whose first word is not ours stands alone
    assert tokens.count(20) == 1
    assert not {50, 32, 36, 38, 40, 42} & set(tokens)
    assert packed.stems == (3, 1, 4)
    assert packed.branches == ((2, 2, 2), (1,), ())
    assert len(tokens) == sum(packed.stems) + sum(map(sum, packed.branches))
    assert packed.targets.tolist() == [
        t for s in SAMPLES for t, scored in zip(s.token_ids, s.loss_mask, strict=True) if scored
    ]


def test_a_single_completion_is_one_document() -> None:
    packed = PackedSamples.of(SAMPLES[:1])
    assert (packed.stems, packed.branches) == ((5,), ((),))
    assert packed.rows.tolist() == [2, 3, 4]


@pytest.mark.parametrize("multiple", [1, 4])
def test_unshared_every_branch_is_a_document_and_has_the_same_scores(model: Transformer, multiple: int) -> None:
    shared, unshared = PackedSamples.of(SAMPLES), PackedSamples.of(SAMPLES).unshared(multiple)
    assert unshared.stems == {1: (5, 5, 5, 2, 4), 4: (8, 8, 8, 4, 4)}[multiple]
    assert unshared.branches == ((),) * 5
    assert len(unshared.token_ids) == sum(unshared.stems)
    ours, theirs = unshared.score(model), shared.score(model)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(len(theirs[0]))
    expected = gradients(model, theirs[0], upstream)
    for name, gradient in gradients(model, ours[0], upstream).items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_nothing_unshared_is_nothing() -> None:
    unshared = PackedSamples.of([]).unshared(4)
    assert (len(unshared.token_ids), len(unshared.rows), unshared.stems) == (0, 0, ())


@pytest.mark.parametrize("samples", [[], SAMPLES[5:6]])
def test_nothing_to_score(model: Transformer, samples: list[Sample]) -> None:
    logprobs, entropies = PackedSamples.of(samples).score(model)
    assert len(logprobs) == len(entropies) == 0


def test_temperatures_are_those_of_each_token() -> None:
    temperatures = PackedSamples.of(SAMPLES).temperatures
    assert temperatures is not None
    assert temperatures.tolist() == [1.0] * 4 + [0.5] + [1.0] * 8
