"""How far the rollouts of a step are, between the prompts and the gradient: what policies are told of the step.

    to start -> generating -> partial -> waiting -> scoring -> scored -> pending -> trained

The loop tells what it scores and sends, and when an evaluation comes (`events.phases`); the buffer and the groups that
are being generated are looked at, and the trainer's client says what it has been given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ductile.core.scheduling.facts.cluster_state import BatchProgress
from ductile.events.phases import EvaluatePhase, ForwardBackwardPhase, ScorePhase, StepListener, StepPhase
from ductile.records import RolloutGroup


@dataclass(frozen=True, slots=True)
class SamplesInFlight:
    """Rollouts somewhere between the buffer and the gradient."""

    rollouts: int = 0
    tokens: int = 0
    """Tokens of prompts and completions."""

    @staticmethod
    def of(groups: Sequence[RolloutGroup]) -> "SamplesInFlight":
        return SamplesInFlight(sum(len(group.rollouts) for group in groups), sum(group.num_tokens for group in groups))

    def __add__(self, other: "SamplesInFlight") -> "SamplesInFlight":
        return SamplesInFlight(self.rollouts + other.rollouts, self.tokens + other.tokens)

    def __sub__(self, other: "SamplesInFlight") -> "SamplesInFlight":
        return SamplesInFlight(self.rollouts - other.rollouts, self.tokens - other.tokens)


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step consists of, and how many there are."""

    max_steps: int
    groups_per_step: int
    group_size: int
    """Rollouts of a prompt."""
    n_minibatches: int = 1
    """Optimizer steps in each step."""
    steps_ahead: int = 0
    """Steps that rollouts may be ahead of training, as `StalenessBound.ahead` has it."""
    scores: bool = False
    """Samples go to a scorer before the trainer gets them."""


class WaitingGroups(Protocol):
    """The buffer: finished groups that wait for the trainer."""

    version: int
    """The step."""
    num_taken: int
    """Groups that the trainer has taken in this step."""
    num_updates: int
    """Optimizer steps that are done in this step."""

    @property
    def room(self) -> int:
        """Groups that may be started, once weights are live."""
        ...

    @property
    def takeable(self) -> tuple[int, int]:
        """Groups that the trainer may take: how many, and their tokens with the prompts."""
        ...

    @property
    def held_back(self) -> tuple[int, int]:
        """Finished groups that wait until older ones are, as `takeable` counts."""
        ...


class GeneratedGroups(Protocol):
    @property
    def partial(self) -> tuple[int, int]:
        """Finished completions of prompts that have unfinished ones: how many, and their tokens with the prompts."""
        ...


class StepAccounting(StepListener):
    def __init__(self, size: StepSize, waiting: WaitingGroups, generated: GeneratedGroups) -> None:
        self._size, self._waiting, self._generated = size, waiting, generated
        self.scoring = SamplesInFlight()
        """Samples that are being scored: out of the buffer, and not yet in `scored`."""
        self.scored = SamplesInFlight()
        """Samples that wait for the trainer's client to have them, which says from then on what is left of them."""
        self._evaluates = False
        """An evaluation is next, or under way."""
        self._to_evaluate = 0
        """Rollouts that the next evaluation will ask for, and has not asked for yet."""

    # -- what the loop tells

    def on_step_begin(self, version: int, num_evaluated: int) -> None:
        self._evaluates, self._to_evaluate = num_evaluated > 0, num_evaluated

    def on_phase_begin(self, phase: StepPhase) -> None:
        match phase:
            case ScorePhase(groups=groups):
                self.scoring = SamplesInFlight.of(groups)
            case ForwardBackwardPhase(groups=groups):
                self.scored -= SamplesInFlight.of(groups)
            case EvaluatePhase():
                self._to_evaluate = 0  # its requests are with the generators
            case _:
                pass

    def on_phase_end(self, phase: StepPhase) -> None:
        match phase:
            case ScorePhase(samples=samples):
                self.scored = self.scored + self.scoring if samples else self.scored
                self.scoring = SamplesInFlight()
            case EvaluatePhase():
                self._evaluates = False
            case _:
                pass

    # -- what policies are told

    def to_start(self, num_queued: int) -> int:
        """Rollouts, those of an evaluation too, that no generator has and that could begin. num_queued: requests that
        wait because there is no generator."""
        return max(0, self._waiting.room) * self._size.group_size + num_queued + self._to_evaluate

    def samples_ready(self, pending: SamplesInFlight) -> int:
        """Rollouts that the trainer could have or has been given. pending: what it has been given and not done yet."""
        held = self.scoring + self.scored + pending
        return self._waiting.takeable[0] * self._size.group_size + held.rollouts

    def batch(self, pending: SamplesInFlight, num_queued: int) -> BatchProgress:
        """How far the step is. pending: samples that the trainer has been given and not done yet. num_queued: requests
        that wait because there is no generator. A last evaluation is a step that trains nothing:
        generators are needed once more."""
        size, waiting = self._size, self._waiting
        with_trainer = pending + self.scored
        num_groups, tokens = waiting.takeable
        to_score = SamplesInFlight(num_groups * size.group_size, tokens) + self.scoring
        ready, to_score = (with_trainer, to_score) if size.scores else (with_trainer + to_score, SamplesInFlight())
        is_over = waiting.version >= size.max_steps
        partial, partial_tokens = self._generated.partial
        num_held_back, held_back_tokens = waiting.held_back
        return BatchProgress(
            step=waiting.version,
            num_rollouts=0 if is_over else size.groups_per_step * size.group_size,
            group_size=size.group_size,
            trained=0 if is_over else waiting.num_taken * size.group_size - (with_trainer + self.scoring).rollouts,
            ready=ready.rollouts,
            ready_tokens=ready.tokens,
            partial=partial + num_held_back * size.group_size,
            partial_tokens=partial_tokens + held_back_tokens,
            to_score=to_score.rollouts,
            to_score_tokens=to_score.tokens,
            to_start=self.to_start(num_queued),
            update=waiting.num_updates,
            num_updates=size.n_minibatches,
            steps_left=max(size.max_steps - waiting.version, 1 if self._evaluates else 0),
            steps_ahead=size.steps_ahead,
        )
