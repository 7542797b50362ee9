"""The scoring head against log_softmax of all logits: values, entropies and gradients, in one chunk and in many."""

import pytest
import torch
from torch.nn import functional as F

from ductile.config.schema.model import TrainerModelConfig
from ductile.model import logprobs
from ductile.model.logprobs import LogprobHead, _logits, tokens_of_chunk

T, M, V, N = 30, 8, 11, 17


@pytest.mark.parametrize("chunk_elements", [10**6, 5 * V, 1], ids=["one chunk", "four chunks", "a row a chunk"])
@pytest.mark.parametrize("with_temperatures", [False, True])
def test_against_log_softmax(monkeypatch: pytest.MonkeyPatch, chunk_elements: int, with_temperatures: bool) -> None:
    monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", chunk_elements)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, M, generator=generator, requires_grad=True)
    weight = torch.randn(V, M, generator=generator, requires_grad=True)
    rows = torch.randint(0, T, (N,), generator=generator)
    targets = torch.randint(0, V, (N,), generator=generator)
    temperatures = torch.rand(N, generator=generator) + 0.3 if with_temperatures else None
    upstream = torch.randn(N, generator=generator)

    got, entropies = LogprobHead(rows, targets, temperatures)(hidden, weight)
    got_gradients = torch.autograd.grad((got * upstream).sum(), (hidden, weight), retain_graph=True)
    of_both = torch.autograd.grad(((got - 3 * entropies) * upstream).sum(), (hidden, weight), retain_graph=True)
    of_entropies = torch.autograd.grad((entropies * upstream).sum(), (hidden, weight))

    scaled = F.linear(hidden, weight)[rows] / (1.0 if temperatures is None else temperatures[:, None])
    expected = scaled.log_softmax(-1)
    chosen = expected.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(got, chosen)
    wanted = -(expected.exp() * expected).sum(-1)
    torch.testing.assert_close(entropies, wanted)

    def gradients(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((values * upstream).sum(), (hidden, weight), retain_graph=True)

    torch.testing.assert_close(got_gradients, gradients(chosen))
    torch.testing.assert_close(of_both, gradients(chosen - 3 * wanted), rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(of_entropies, gradients(wanted), rtol=1e-3, atol=2e-4)


def test_a_token_of_probability_zero_leaves_the_gradient_of_the_entropy_finite() -> None:
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[300.0, 0.0], [0.0, 1.0], [-300.0, 0.0]], requires_grad=True)
    _, entropies = LogprobHead(torch.tensor([0]), torch.tensor([0]))(hidden, weight)
    entropies.sum().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize(("fp32", "tolerance"), [(False, 1e-1), (True, 1e-6)])
def test_bf16_weights_give_fp32_scores_which_an_fp32_head_does_not_round(fp32: bool, tolerance: float) -> None:
    torch.manual_seed(1)  # of other numbers a target may be certain, whose log-prob is 0
    hidden, weight = (10 * torch.randn(4, M, dtype=torch.bfloat16) for _ in range(2))
    exact = [each.double().requires_grad_() for each in (hidden, weight)]
    rows, targets = torch.tensor([0, 2]), torch.tensor([1, 3])
    head = LogprobHead(rows, targets, fp32=fp32)
    got, entropies = head(hidden.requires_grad_(), weight.requires_grad_())
    assert got.dtype == entropies.dtype == torch.float32
    expected = F.linear(*exact)[rows].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    off = (got - expected).abs().max() / expected.abs().max()
    assert off < tolerance
    assert fp32 or off > 1e-6
    got.sum().backward()
    expected.sum().backward()
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype == torch.bfloat16
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-1, rtol=5e-2)


@pytest.mark.parametrize(("size", "num_logits"), [("auto", 6 * V), (4, 4 * V), ("disabled", N * V)])
def test_the_config_says_how_many_logits_exist_at_a_time(
    monkeypatch: pytest.MonkeyPatch, size: int | str, num_logits: int
) -> None:
    monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", 6 * V)
    seen: list[slice] = []
    monkeypatch.setattr(logprobs, "_logits", lambda *args: seen.append(args[-1]) or _logits(*args))
    model = TrainerModelConfig.model_validate({"fused_lm_head_token_chunk_size": size})
    head = LogprobHead(torch.arange(N), torch.zeros(N, dtype=torch.int64), None, model.head_chunk_tokens)
    head(torch.randn(T, M), torch.randn(V, M))
    assert max(rows.stop - rows.start for rows in seen) * V == num_logits


@pytest.mark.parametrize(
    ("device_type", "vocab_size", "tokens"),
    [
        ("cpu", 151_936, 220),
        ("cuda", 151_936, 883),
        ("cpu", 1 << 26, 1),
    ],
)
def test_a_gpu_scores_more_tokens_at_a_time(device_type: str, vocab_size: int, tokens: int) -> None:
    assert tokens_of_chunk(device_type, vocab_size) == tokens
