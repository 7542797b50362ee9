"""Says where the step stands, in the words of `core.scheduling.state`: read off the loop's books on each call."""

from typing import Protocol

from ductile.core.scheduling.state import BatchProgress
from ductile.orchestrator.loop import Loop, SamplesInFlight


class Training(Protocol):
    """What the trainer has been given and not yet worked on."""

    @property
    def pending_samples(self) -> int: ...

    @property
    def pending_tokens(self) -> int: ...


class Generating(Protocol):
    @property
    def num_waiting(self) -> int:
        """Requests that no generator has, because there is none."""
        ...


class Monitor:
    def __init__(
        self, loop: Loop, training: Training, generating: Generating, *, group_size: int, steps_ahead: int
    ) -> None:
        """steps_ahead: as the staleness bound has it."""
        self.loop = loop
        self._training, self._generating = training, generating
        self._group_size, self._steps_ahead = group_size, steps_ahead

    @property
    def to_start(self) -> int:
        """Rollouts, those of an evaluation too, that no generator has and that could begin."""
        room = max(0, self.loop.buffer.room) * self._group_size
        return room + self._generating.num_waiting + self.loop.to_evaluate

    @property
    def samples_ready(self) -> int:
        """Rollouts that the trainer could have or has been given."""
        loop = self.loop
        held = loop.scoring + loop.scored + loop.sending
        return len(loop.buffer) * self._group_size + held.rollouts + self._training.pending_samples

    def batch(self) -> BatchProgress:
        """A last evaluation is a step that trains nothing: generators are needed once more."""
        loop, buffer, plan = self.loop, self.loop.buffer, self.loop.schedule
        pending, size = self._training, self._group_size
        with_trainer = SamplesInFlight(pending.pending_samples, pending.pending_tokens) + loop.sending + loop.scored
        to_score = SamplesInFlight(len(buffer) * size, buffer.waiting_tokens) + loop.scoring
        ready, to_score = (with_trainer, to_score) if loop.scorer else (with_trainer + to_score, SamplesInFlight())
        is_over = buffer.version >= plan.max_steps
        partial, partial_tokens = loop.rollouts.partial
        return BatchProgress(
            step=buffer.version,
            num_rollouts=0 if is_over else plan.groups_per_step * size,
            group_size=size,
            trained=0 if is_over else buffer.num_taken * size - (with_trainer + loop.scoring).rollouts,
            ready=ready.rollouts,
            ready_tokens=ready.tokens,
            partial=partial,
            partial_tokens=partial_tokens,
            to_score=to_score.rollouts,
            to_score_tokens=to_score.tokens,
            to_start=self.to_start,
            update=buffer.num_updates,
            num_updates=plan.n_minibatches,
            steps_left=max(plan.max_steps - buffer.version, 1 if loop.evaluates else 0),
            steps_ahead=self._steps_ahead,
        )
