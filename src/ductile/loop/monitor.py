"""Where the step stands, in the words of `core.cluster.state`: read off the loop's books whenever somebody asks."""

from typing import Protocol

from ductile.core.cluster.state import Batch
from ductile.loop.loop import Loop


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
        held = loop.hand.rollouts + loop.handing_over.rollouts
        return len(loop.buffer) * self._group_size + held + self._training.pending_samples

    def batch(self) -> Batch:
        """A last evaluation is a step that trains nothing: generators are needed once more."""
        loop, buffer, plan = self.loop, self.loop.buffer, self.loop.plan
        hand, given, pending, size = loop.hand, loop.handing_over, self._training, self._group_size
        ready, ready_tokens = pending.pending_samples + given.rollouts, pending.pending_tokens + given.tokens
        to_score = to_score_tokens = 0
        waiting, waiting_tokens = len(buffer) * size, buffer.waiting_tokens
        if loop.scorer is None:
            ready, ready_tokens = ready + waiting + hand.rollouts, ready_tokens + waiting_tokens + hand.tokens
        else:
            unscored = (0, 0) if hand.scored else (hand.rollouts, hand.tokens)
            to_score, to_score_tokens = waiting + unscored[0], waiting_tokens + unscored[1]
            ready, ready_tokens = ready + hand.rollouts - unscored[0], ready_tokens + hand.tokens - unscored[1]
        is_over = buffer.version >= plan.max_steps
        partial, partial_tokens = loop.rollouts.partial
        return Batch(
            step=buffer.version,
            num_rollouts=0 if is_over else plan.groups_per_step * size,
            group_size=size,
            trained=0
            if is_over
            else buffer.num_taken * size - hand.rollouts - given.rollouts - pending.pending_samples,
            ready=ready,
            ready_tokens=ready_tokens,
            partial=partial,
            partial_tokens=partial_tokens,
            to_score=to_score,
            to_score_tokens=to_score_tokens,
            to_start=self.to_start,
            update=buffer.num_updates,
            num_updates=plan.n_minibatches,
            steps_left=max(plan.max_steps - buffer.version, 1 if loop.evaluates else 0),
            steps_ahead=self._steps_ahead,
        )
