"""The dumb twin of the trainer: one device, one sample at a time, all logits, torch's own tools."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ductile.config.schema.trainer import LossConfig
from ductile.core.batch.loss_aggregation import LossAggregation, loss_denominator, weigh
from ductile.model.attention import PackedAttention
from ductile.model.checkpoint import load_model
from ductile.model.transformer import Transformer
from ductile.records import Sample
from ductile.trainer.loss import LossInputs, make_loss

VOCAB = 90


def make_samples(lengths: Sequence[int], seed: int = 0, temperatures: Sequence[float] = (1.0,)) -> list[Sample]:
    """RL samples with a few masked tokens and every optional list."""
    random = torch.Generator().manual_seed(seed)

    def uniform(n: int, low: float, high: float) -> tuple[float, ...]:
        return tuple((torch.rand(n, generator=random) * (high - low) + low).tolist())

    samples = []
    for index, n in enumerate(lengths):
        mask = [False, *(torch.rand(n - 1, generator=random) < 0.8).tolist()]
        samples.append(
            Sample(
                token_ids=tuple(torch.randint(5, VOCAB, (n,), generator=random).tolist()),
                loss_mask=tuple(mask),
                rollout_logprobs=uniform(n, -6.0, -3.0),
                advantages=tuple(a if m else 0.0 for a, m in zip(uniform(n, -1.0, 1.0), mask, strict=True)),
                old_logprobs=uniform(n, -6.0, -3.0),
                ref_logprobs=uniform(n, -6.0, -3.0),
                temperature=temperatures[index % len(temperatures)],
            )
        )
    return samples


class NaiveTrainer:
    def __init__(self, folder: str | Path, loss: LossConfig, optimizer: type[torch.optim.Optimizer], **options) -> None:
        self.model = load_model(folder)
        self.loss = make_loss(loss)
        self.optimizer = optimizer(self.model.parameters(), **options)

    def gradients(self, samples: Sequence[Sample], mode: LossAggregation = "token_mean") -> tuple[float, float]:
        """Loss and gradient norm; the gradients are left in the parameters."""
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for sample in weigh(samples, mode):
            total = total + summed_loss(self.model, sample, self.loss)
        loss = total / loss_denominator(samples, mode)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).double().norm()
        return loss.item(), norm.item()

    def step(self, samples: Sequence[Sample], max_norm: float | None, mode: LossAggregation = "token_mean") -> float:
        loss, _ = self.gradients(samples, mode)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        return loss


def summed_loss(model: Transformer, sample: Sample, loss) -> Tensor:
    tokens = torch.tensor(sample.token_ids)
    logits = model(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)])) / sample.temperature
    logprobs = logits[:-1].log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(1, tokens[1:, None])[:, 0]
    mask = torch.tensor(sample.loss_mask)[1:]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values)[1:][mask]

    inputs = LossInputs(
        logprobs=chosen[mask],
        entropies=entropies[mask],
        rollout_logprobs=column(sample.rollout_logprobs),
        old_logprobs=column(sample.old_logprobs),
        reference=column(sample.ref_logprobs),
        advantages=column(sample.advantages),
        sequences=torch.zeros(int(mask.sum()), dtype=torch.int64),
    )
    weights = column(sample.weights) if sample.weights else torch.ones(int(mask.sum()))
    return (weights * loss(inputs).loss).sum()
