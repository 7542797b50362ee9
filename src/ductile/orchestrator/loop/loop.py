"""The RL loop: rollouts, scores, gradients, an optimizer step, new weights, and again.

`Rollouts` fills the `Buffer` from the generators' side; `Loop.train_step` empties it from the trainer's, and sends new
weights back. Step `s` trains version `s` of the weights into version `s + 1`.

    Rollouts → Buffer → take → score → forward_backward     chunk by chunk: the trainer works on one, and the next is
        ↑                                     ↓             generated, taken and scored meanwhile
        └──────────────── publish ←───── optim_step         n_minibatches times, then `Publisher` has a version received

Put together by `ductile.orchestrator.loop.assembly`. Trainer, generators and scorer are Protocols of `ductile.roles`:
processes, tests and simulations run this same page. Accounting, metrics and the elastic controller follow a step by its
phases (`ductile.events.phases`).
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from ductile.concurrency.structured import Pause, PipelinedTask, cancel_on, undisturbed
from ductile.core.batch.chunking import shares
from ductile.events.phases import (
    EvaluatePhase,
    ForwardBackwardPhase,
    OptimStepPhase,
    ScorePhase,
    StepListeners,
    WaitPhase,
)
from ductile.orchestrator.ending.save_once import saved_in_the_end
from ductile.orchestrator.loop.evaluate import Evaluation
from ductile.orchestrator.loop.publisher import Publisher
from ductile.orchestrator.loop.rollouts import Rollouts
from ductile.orchestrator.loop.run_output import RunOutput
from ductile.orchestrator.loop.run_schedule import RunSchedule
from ductile.orchestrator.loop.sample_builder import SampleBuilder
from ductile.records import RolloutGroup, Sample
from ductile.roles import TrainerClient


class PausableTrainer(TrainerClient, Protocol):
    @property
    def pause(self) -> Pause:
        """No micro-step begins while a scheduling policy holds training."""
        ...


@dataclass(slots=True)
class Minibatch:
    """What one optimizer step learns from, as far as it is there."""

    num_groups: int
    """Groups that it wants."""
    groups: list[RolloutGroup] = field(default_factory=list[RolloutGroup])
    loss_denominator: float = 0.0

    @property
    def num_missing(self) -> int:
        return self.num_groups - len(self.groups)


@dataclass(slots=True)
class ScoredGroups:
    """Samples for the trainer, and the groups that they were made of: none where no group has an advantage."""

    groups: list[RolloutGroup] = field(default_factory=list[RolloutGroup])
    samples: list[Sample] = field(default_factory=list[Sample])

    def add(self, other: "ScoredGroups") -> None:
        self.groups = [*self.groups, *other.groups]
        self.samples = [*self.samples, *other.samples]


class Loop:
    def __init__(
        self,
        schedule: RunSchedule,
        trainer: PausableTrainer,
        rollouts: Rollouts,
        sample_builder: SampleBuilder,
        publisher: Publisher,
        evaluation: Evaluation | None,
        output: RunOutput,
        listeners: StepListeners,
        stop: asyncio.Event,
    ) -> None:
        """stop: once set, the running step is the last."""
        self.schedule, self.trainer, self.rollouts, self.buffer = schedule, trainer, rollouts, rollouts.buffer
        self.sample_builder, self.publisher, self.evaluation = sample_builder, publisher, evaluation
        self.output, self.listeners, self.stop = output, listeners, stop
        self.step = self.buffer.version
        """Steps that are done; also the version of the weights."""
        self.training = PipelinedTask(on_error=self.buffer.fail)
        """The samples that the trainer works on."""

    async def run(self, death: Coroutine[Any, Any, str] | None = None) -> int:
        """Train until `max_steps` or `stop`. Returns the step.

        However it ends, what was trained is saved. What a role raises ends it, and so does `death`, which returns when
        a process is lost that the run needs; it is raised when that is done.
        """
        async with self.publisher.at_work():
            await saved_in_the_end(self.train(), self.save, self.output.save.when(self.stop), death)
        return self.step

    async def train(self) -> None:
        """Step after step, from the first weights to the last ones."""
        async with self.publisher:
            is_evaluated = self.step == 0 or self.output.began.owes_evaluation
            await self.make_live(is_evaluated=is_evaluated)
            await self.publisher.finish()
            async with self.rollouts, self.training:
                if is_evaluated:
                    await self.evaluate()
                self.output.begin(self.step)
                while self.step < self.schedule.max_steps and not self.stop.is_set():
                    with self.output.step(self.step + 1):
                        await self.train_step()
                        if self.schedule.evaluates_after(self.step):
                            await self.evaluate()
                    if self.output.save_due(self.step):
                        await self.save()
            await self.save()  # before the run waits for the last weights to arrive

    async def train_step(self) -> None:
        """Go once round the RL loop: train one version of the weights into the next, and have that sampled from."""
        for num_groups in shares(self.schedule.groups_per_step, self.schedule.n_minibatches):
            batch = Minibatch(num_groups)
            while batch.num_missing:
                groups = await self.take(batch)
                scored = await self.score(batch, groups)
                await self.forward_backward(batch, scored)
            await self.optim_step(batch)
        await self.publish()

    async def take(self, batch: Minibatch) -> list[RolloutGroup]:
        """Take a chunk of finished groups. Waits for `Rollouts` to put them into the buffer. Raises what fails there,
        and what fails in the trainer or on the way of new weights meanwhile (`Buffer.fail`)."""
        with self.listeners.during(WaitPhase()):
            groups = await self.buffer.take(
                batch.num_missing,
                groups_per_update=batch.num_groups,
                num_ranks=self.trainer.num_ranks,
                per_rank=self.trainer.micro_batches_per_rank,
                seq_len=self.schedule.seq_len,
                soon=self.rollouts.num_soon,
            )
        batch.groups += groups
        return groups

    async def score(self, batch: Minibatch, groups: list[RolloutGroup]) -> ScoredGroups:
        """Make samples of groups. Waits for the scorer, where there is one."""
        with self.listeners.during(ScorePhase(groups, self.sample_builder.scorer is not None)) as phase:
            phase.samples = samples = await self.sample_builder.build(groups)
        batch.loss_denominator += self.sample_builder.loss_denominator(samples)
        return ScoredGroups(groups, samples) if samples else ScoredGroups()

    async def forward_backward(self, batch: Minibatch, scored: ScoredGroups) -> None:
        """Give samples to the trainer, which works on them while the next chunk is generated, taken and scored.

        Waits until the trainer has done what it was given before. While the policy holds it, all other chunks are taken
        and scored, too, and then they go to it as one. What has no samples waits for nothing.
        """
        if not scored.samples:
            return
        while groups := await self.take_while_held(batch):
            scored.add(await self.score(batch, groups))
        await self.training.start(self.accumulate(scored))

    async def take_while_held(self, batch: Minibatch) -> list[RolloutGroup]:
        """Take the next chunk if the policy holds the trainer: the policy may wait until all is scored, and nothing
        else would ask for that. Without such a pause, waits until the trainer has done what it has, and takes none."""
        if self.sample_builder.scorer is None or not batch.num_missing:
            return []
        pause = self.trainer.pause
        while not self.training.idle.is_set() and await cancel_on(self.training.idle, pause.begun.wait()):
            if groups := await cancel_on(pause.over, self.take(batch)):
                return groups
        return []

    async def accumulate(self, scored: ScoredGroups) -> None:
        """Have the trainer accumulate gradients, beside the loop. Waits for it; also while the policy holds it."""
        with self.listeners.during(ForwardBackwardPhase(scored.groups)):
            await self.trainer.forward_backward(scored.samples, self.schedule.seq_len)

    async def optim_step(self, batch: Minibatch) -> None:
        """Step the optimizer with what has been accumulated. Waits until the trainer has done all samples.

        The weights and the books of what they were trained on belong together: a cancellation waits for both.
        """
        await self.training.finish()
        await undisturbed(self.update(batch))

    async def update(self, batch: Minibatch) -> None:
        """Step the optimizer and the books. Waits for a checkpoint that is being written, and for the trainer."""
        await self.output.save.update_begins()
        with self.listeners.during(OptimStepPhase(self.step + 1, batch.groups, batch.loss_denominator)) as phase:
            # Where there is nothing to learn, the learning rate still follows the batches.
            phase.report = await self.trainer.optim_step(batch.loss_denominator)
        self.buffer.mark_trained(batch.groups)
        if self.buffer.num_updates == self.schedule.n_minibatches:
            self.step += 1
            self.output.save.step_ends(self.step)

    async def publish(self) -> None:
        """Make the new weights live, unless the run is about to end: nothing would be sampled from them."""
        if not self.stop.is_set():
            await self.make_live(is_evaluated=self.schedule.evaluates_after(self.step))

    async def make_live(self, *, is_evaluated: bool) -> None:
        """Begin the step that trains the trainer's weights, and publish them. Waits for the trainer, and not until they
        are live: `Rollouts` starts groups from then on (`Publisher.publish`)."""
        num_evaluated = self.evaluation.num_completions if self.evaluation and is_evaluated else 0
        self.listeners.on_step_begin(self.step, num_evaluated)
        self.buffer.next_version(self.step)
        await self.publisher.publish(self.step)

    async def evaluate(self) -> None:
        """Evaluate the weights on held-out prompts. Waits until they are live, and for all completions; `stop` cuts
        that short. Nothing is published meanwhile."""
        await self.publisher.finish()
        if self.evaluation is None:
            return
        with self.listeners.during(EvaluatePhase()) as phase:
            if not self.stop.is_set():
                report = await cancel_on(self.stop, self.evaluation.run(self.step))
                phase.metrics = report.metrics() if report else None

    async def save(self) -> None:
        """Save the step, unless that was tried before."""
        await self.output.save(self.step)
