"""What a trainer computes of a few batches, on whichever mesh it lies, and how far that is from what another does."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike

from ductile.config.schema.trainer import AdamWConfig, TrainerConfig
from ductile.core.layout.model.spec import ModelSpec
from ductile.messages.workers import ForwardBackward
from ductile.records import Sample, StepReport
from ductile.trainer.state import named_gradient, named_state, parts_of
from ductile.trainer.train_role import TrainRole
from tests.parity.assemble import Array, Buffers, assemble, state_layout
from tests.parity.batches import TrainingBatch, micro_batches
from tests.parity.recorded import Recorded, Token, take_recorded
from tests.trainer.fleet import Fleet
from tests.trainer.naive import NaiveTrainer

PARAMETERS = ("model/",)
STATE = (*PARAMETERS, "exp_avg/", "exp_avg_sq/")
GRADIENT = ("gradient/",)
"""Prefixes of the names of a trainer's tensors."""


BOUNDS = {"loss": 1e-4, "logprob": 1e-4, "entropy": 1e-4, "grad_norm": 1e-4, "gradient": 1e-4, "update": 1e-3}
"""How far a mesh may be from one device (`differences`)."""


@dataclass(frozen=True)
class Measured:
    """An optimizer step on each batch."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    num_tokens: tuple[int, ...]
    tokens: Mapping[Token, Sequence[Recorded]]
    """What every slot that computed the loss had of each trained token of all batches."""
    gradient: Mapping[str, Array]
    """Gradient of the first batch, before it was clipped."""
    before: Mapping[str, Array]
    after: Mapping[str, Array]
    """Parameters before the first step and after the last."""


def differences(ours: Measured, reference: Measured) -> dict[str, float]:
    """Largest differences: of losses, log-probs and entropies absolute; of gradient norms relative; of each parameter's
    gradient relative to the largest in that parameter; and the norm of the difference after all steps, relative to the
    norm of what they changed."""
    return {
        "loss": largest(np.subtract(ours.losses, reference.losses)),
        "logprob": _of_tokens(ours, reference, lambda recorded: recorded.logprob),
        "entropy": _of_tokens(ours, reference, lambda recorded: recorded.entropy),
        "grad_norm": largest(np.divide(ours.grad_norms, reference.grad_norms) - 1),
        "gradient": largest(
            [
                largest(ours.gradient[name] - gradient) / largest(gradient)
                for name, gradient in reference.gradient.items()
            ]
        ),
        "update": _norm_of_difference(ours.after, reference.after)
        / _norm_of_difference(reference.after, reference.before),
    }


def measure(fleet: Fleet, spec: ModelSpec, batches: Sequence[TrainingBatch]) -> Measured:
    """Train a fresh trainer, on whichever slots it has been assigned to."""
    fleet.call(fleet.layout.slots, _taken)
    before = whole_state(fleet, spec, PARAMETERS)
    reports: list[StepReport] = []
    gradients: list[Mapping[str, Array]] = []
    for batch in batches:
        for chunk in batch.chunks:
            run_chunk(fleet, chunk)
        if not gradients:
            fleet.call(fleet.layout.slots, _reduce)
            summed = whole_state(fleet, spec, GRADIENT)
            gradients.append({name: gradient / batch.loss_denominator for name, gradient in summed.items()})
        reports.append(fleet.optim_step(batch.loss_denominator))
    return Measured(
        losses=tuple(report.loss for report in reports),
        grad_norms=tuple(report.grad_norm for report in reports),
        num_tokens=tuple(report.num_tokens for report in reports),
        tokens=_recorded_tokens(fleet, batches),
        gradient=gradients[0],
        before=before,
        after=whole_state(fleet, spec, PARAMETERS),
    )


def train_on(fleet: Fleet, batch: TrainingBatch) -> StepReport:
    for chunk in batch.chunks:
        run_chunk(fleet, chunk)
    return fleet.optim_step(batch.loss_denominator)


def run_chunk(fleet: Fleet, samples: Sequence[Sample]) -> None:
    dealt = fleet.layout.deal(micro_batches(samples, fleet.layout))
    fleet.ask({slot: ForwardBackward(of_slot) for slot, of_slot in dealt.items()})
    fleet.with_gradient = True


def whole_state(fleet: Fleet, spec: ModelSpec, kinds: tuple[str, ...]) -> dict[str, Array]:
    """The trainer's tensors of these kinds, of what its slots have in memory. Raises WrongParts."""
    held = fleet.call(fleet.layout.slots, _held, kinds)
    return assemble(state_layout(spec, fleet.layout, kinds), held)


def published(fleet: Fleet) -> list[dict[str, Array]]:
    """The parameters as each slot gathers them when a version is published."""
    return list(fleet.call(fleet.layout.slots, _gathered).values())


def measure_textbook(
    role: TrainRole | None, folder: Path, batches: Sequence[TrainingBatch], settings: dict
) -> Measured:
    """The same by `NaiveTrainer`: one device, one sample at a time, all logits, torch's own optimizer."""
    config = TrainerConfig.model_validate(settings)
    optim = config.optim
    assert isinstance(optim, AdamWConfig)
    options = {"betas": (optim.betas1, optim.betas2), "eps": optim.eps, "weight_decay": optim.weight_decay}
    naive = NaiveTrainer(folder, config.loss, torch.optim.AdamW, lr=optim.lr, **options)
    take_recorded()
    before = _parameters(naive)
    losses, grad_norms, gradients = zip(
        *(_textbook_step(naive, batch, optim.max_norm) for batch in batches), strict=True
    )
    return Measured(
        losses,
        grad_norms,
        tuple(sum(sample.num_trained for sample in batch.samples) for batch in batches),
        {token: [recorded] for token, recorded in take_recorded()},
        gradients[0],
        before,
        _parameters(naive),
    )


def _textbook_step(
    naive: NaiveTrainer, batch: TrainingBatch, max_norm: float | None
) -> tuple[float, float, dict[str, Array]]:
    loss, grad_norm = naive.gradients(batch.samples)
    gradient = {f"gradient/{name}": p.grad.numpy().copy() for name, p in naive.model.named_parameters()}
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(naive.model.parameters(), max_norm)
    naive.optimizer.step()
    return loss, grad_norm, gradient


def _parameters(naive: NaiveTrainer) -> dict[str, Array]:
    return {f"model/{name}": p.detach().numpy().copy() for name, p in naive.model.named_parameters()}


def _held(role: TrainRole, kinds: tuple[str, ...]) -> Buffers:
    trainer = role._live
    parts = parts_of(named_state(trainer) | named_gradient(trainer))
    return {name: part.numpy() for name, part in parts.items() if name.startswith(kinds)}


def _reduce(role: TrainRole) -> None:
    role._live.reduce_gradients()


def _gathered(role: TrainRole) -> dict[str, Array]:
    return {f"model/{name}": tensor.clone().numpy() for name, tensor in role._live.publish_weights()}


def _recorded_tokens(fleet: Fleet, batches: Sequence[TrainingBatch]) -> dict[Token, list[Recorded]]:
    """What the loss saw of each token. Slots whose sums count have seen each token exactly once."""
    by_slot = fleet.call(fleet.layout.slots, _taken)
    counted = [token for slot, seen in by_slot.items() if fleet.layout.counts_samples(slot) for token, _ in seen]
    trained = [
        token
        for batch in batches
        for sample in batch.samples
        for token in sample.rollout_logprobs.array[sample.loss_mask.array].tolist()
    ]
    assert len(trained) == len(set(trained)), "no two tokens were sampled at the same log-prob"
    assert sorted(counted) == sorted(trained), "each trained token counts once"
    found: dict[Token, list[Recorded]] = {}
    for seen in by_slot.values():
        for token, recorded in seen:
            found.setdefault(token, []).append(recorded)
    return found


def _taken(role: TrainRole) -> list[tuple[Token, Recorded]]:
    return take_recorded()


def _of_tokens(ours: Measured, reference: Measured, value: Callable[[Recorded], float]) -> float:
    assert ours.tokens.keys() == reference.tokens.keys()
    return largest(
        [
            value(recorded) - value(single)
            for token, (single, *_) in reference.tokens.items()
            for recorded in ours.tokens[token]
        ]
    )


def largest(values: ArrayLike) -> float:
    """The largest absolute value; NaN when one of them is."""
    return float(np.abs(values).max())


def _norm_of_difference(ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> float:
    assert ours.keys() == theirs.keys()
    squares = (np.square(ours[name].astype(np.float64) - theirs[name]).sum() for name in theirs)
    return math.sqrt(sum(squares))
