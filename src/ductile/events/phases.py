"""Phases of a training step, as the loop tells them to those that listen; they are not written down.

    wait → score → forward_backward → optim_step → publish → join → receive → evaluate

Phases overlap: the trainer works on one chunk of groups while the loop waits for the next. A phase has what goes in,
and when it ends what has come of it: None where it failed or was cancelled.

    with listeners.during(ScorePhase(groups)) as phase:
        phase.samples = await sample_builder.build(groups)
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ductile.records import RolloutGroup, Sample, StepReport


class StepPhase:
    name: ClassVar[str]
    """Word for it in a step's metrics (`seconds/<name>`)."""


@dataclass(slots=True)
class WaitPhase(StepPhase):
    """The loop waits for groups that are worth a chunk."""

    name: ClassVar[str] = "wait"


@dataclass(slots=True)
class ScorePhase(StepPhase):
    """Groups become samples."""

    name: ClassVar[str] = "score"
    groups: Sequence[RolloutGroup]
    by_scorer: bool
    """Slots compute log-probs for that."""
    samples: Sequence[Sample] | None = None


@dataclass(slots=True)
class ForwardBackwardPhase(StepPhase):
    """The trainer accumulates the gradient of samples."""

    name: ClassVar[str] = "forward_backward"
    groups: Sequence[RolloutGroup]
    """Groups that the samples were made of."""


@dataclass(slots=True)
class OptimStepPhase(StepPhase):
    name: ClassVar[str] = "optim_step"
    step: int
    """Number of the training step, from 1 on."""
    groups: Sequence[RolloutGroup]
    """Groups that the optimizer step learns from."""
    loss_denominator: float
    """0 where none of them has anything to learn from."""
    report: StepReport | None = None


@dataclass(slots=True)
class PublishPhase(StepPhase):
    """The trainer gives its weights a version that others can fetch."""

    name: ClassVar[str] = "publish"
    num_bytes: int = 0
    """Bytes of what slots fetch; 0 where none does."""


@dataclass(slots=True)
class JoinPhase(StepPhase):
    """New weights wait for slots that are about to generate or score."""

    name: ClassVar[str] = "join"


@dataclass(slots=True)
class ReceivePhase(StepPhase):
    """Generators and scorers fetch the version."""

    name: ClassVar[str] = "receive"


@dataclass(slots=True)
class EvaluatePhase(StepPhase):
    """Held-out prompts are completed and scored."""

    name: ClassVar[str] = "evaluate"
    metrics: Mapping[str, float] | None = None


P = TypeVar("P", bound=StepPhase)


class StepListener:
    """Hears of steps and their phases in the orchestrator's event loop. It returns at once and does not raise. A
    listener overrides what it follows."""

    def on_step_begin(self, version: int, num_evaluated: int) -> None:
        """The step begins that trains `version`, which is about to be published. num_evaluated: completions that an
        evaluation of it will ask for, before any training; 0: it is not evaluated."""

    def on_phase_begin(self, phase: StepPhase) -> None:
        """The phase begins."""

    def on_phase_end(self, phase: StepPhase) -> None:
        """The phase has ended, well or not."""


class StepListeners:
    """Several listeners, told in their order."""

    def __init__(self, *listeners: StepListener) -> None:
        self._listeners = listeners

    def on_step_begin(self, version: int, num_evaluated: int) -> None:
        for listener in self._listeners:
            listener.on_step_begin(version, num_evaluated)

    @contextmanager
    def during(self, phase: P) -> Iterator[P]:
        """Tell when the block begins and when it ends. The block adds to the phase what has come of it."""
        for listener in self._listeners:
            listener.on_phase_begin(phase)
        try:
            yield phase
        finally:
            for listener in self._listeners:
                listener.on_phase_end(phase)
