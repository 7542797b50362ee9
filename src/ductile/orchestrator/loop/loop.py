"""The RL loop: generate, score, reward, advantage, train, publish, and again.

`Rollouts` fills the `Buffer` from the generators' side; `Loop.run` empties it from the trainer's, and sends new weights
back. Step `s` trains version `s` of the weights into version `s + 1`.

Put together by `ductile.orchestrator.commands.compose`:

    buffer   = Buffer(prompts, staleness bound)       which groups are under way, which may be trained on
    rollouts = Rollouts(buffer, episodes)             prompt -> GenerateRequests -> scored RolloutGroup -> buffer
    builder  = SampleBuilder(scorer)                  RolloutGroup -> Samples
    Loop(schedule, trainer, generators, scorer, rollouts, buffer, builder, accounting, ...).run()

Trainer, generators and scorer are Protocols of `ductile.roles`: processes, tests and simulations run this same page.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from ductile.concurrency.structured import PipelinedTask, cancel_on, gather_all, undisturbed
from ductile.core.batch.chunking import shares
from ductile.core.batch.rewards import too_many_failed
from ductile.elastic.controller import ElasticController
from ductile.elastic.step_accounting import StepAccounting
from ductile.events.steps import NothingToLearn
from ductile.observe import Recorder, Stopwatch
from ductile.orchestrator.ending.save_once import SaveOncePerStep, saved_in_the_end
from ductile.orchestrator.loop.buffer import Buffer
from ductile.orchestrator.loop.evaluate import Evaluation, RewardsFailed
from ductile.orchestrator.loop.rollouts import Rollouts
from ductile.orchestrator.loop.sample_builder import SampleBuilder
from ductile.orchestrator.loop.skipped_steps import SkippedSteps
from ductile.orchestrator.loop.step_metrics import StepMetrics
from ductile.records import Manifest, RolloutGroup, Sample
from ductile.roles import Generators, Scorer, TrainerClient


@dataclass(frozen=True, slots=True)
class RunSchedule:
    """How many steps a run has, what one consists of, and when the policy is evaluated."""

    max_steps: int
    groups_per_step: int
    n_minibatches: int = 1
    """Optimizer steps in each step."""
    seq_len: int = 2048
    max_skipped_steps: int | None = None
    """Optimizer steps in a row without a finite gradient that end the run."""
    eval_interval: int | None = None
    """Steps from one evaluation to the next; None: only the first weights and the last are evaluated."""
    max_reward_error_share: float = 1.0
    """Share of a step's rewards that may fail, 0 to 1; when more fail, the run ends."""

    def due(self, interval: int | None, step: int) -> bool:
        return step == self.max_steps or (interval is not None and step % interval == 0)


class Loop:
    def __init__(
        self,
        schedule: RunSchedule,
        trainer: TrainerClient,
        generators: Generators,
        scorer: Scorer | None,
        rollouts: Rollouts,
        buffer: Buffer,
        sample_builder: SampleBuilder,
        accounting: StepAccounting,
        evaluation: Evaluation | None,
        save: Callable[[int], Awaitable[None]],
        save_due: Callable[[int], bool],
        counts: Callable[[], dict[str, float]],
        record: Recorder,
        stop: asyncio.Event,
        step: int = 0,
        show: Callable[[int, Sequence[RolloutGroup]], None] = lambda step, groups: None,
        controller: ElasticController | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """save(step): writes a checkpoint. save_due(step): whether to, in the middle of the run. counts: further
        metrics, of the run so far. stop: once set, the running step is the last. step: what is done already.
        show(step, groups): told of each step's rollouts; must not raise. controller: moves slots between roles; None:
        slots keep the roles that they have. clock: of the step's metrics."""
        self.schedule, self.trainer, self.generators, self.scorer = schedule, trainer, generators, scorer
        self.rollouts, self.buffer, self.sample_builder, self.evaluation = rollouts, buffer, sample_builder, evaluation
        self.save, self.save_due, self.counts, self.show = SaveOncePerStep(save, step, record), save_due, counts, show
        self.record, self.stop, self.step = record, stop, step
        self.accounting, self.controller, self.watch = accounting, controller, Stopwatch(clock)
        self.skips = SkippedSteps(schedule.max_skipped_steps, record, table="trainer.")

    async def run(self, death: Coroutine[Any, Any, str] | None = None) -> int:
        """Train until `max_steps` or `stop`. Returns the step.

        However it ends, what was trained is saved. What a role raises ends it, and so does `death`, which returns when
        a process is lost that the run needs; it is raised when that is done.
        """
        await saved_in_the_end(self.train_steps(), self.save_trained, self.save.when(self.stop), death)
        return self.step

    async def train_steps(self) -> None:
        """Step after step, from the first weights to the last ones."""
        async with PipelinedTask(on_error=self.buffer.fail) as receiving:
            await self.make_live(self.step, receiving, evaluates=self.step == 0)
            await receiving.finish()
            async with self.rollouts:
                if self.step == 0:
                    self.record.metrics(0, await self.evaluate())
                self.watch.lap()
                while self.step < self.schedule.max_steps and not self.stop.is_set():
                    await self.train_step(receiving)
            await self.save_trained()  # before the run waits for the last weights to arrive

    async def train_step(self, receiving: PipelinedTask) -> None:
        """A step: once round the RL loop."""
        schedule, step_metrics, evaluated = self.schedule, StepMetrics(self.step), dict[str, float]()
        try:
            for update, num_groups in enumerate(shares(schedule.groups_per_step, schedule.n_minibatches), start=1):
                await self.train_minibatch(num_groups, step_metrics, ends_step=update == schedule.n_minibatches)
            due = schedule.due(schedule.eval_interval, self.step)
            if not self.stop.is_set():  # no generator would sample from these weights
                await self.make_live(self.step, receiving, evaluates=due)
            if due:
                await receiving.finish()
                evaluated = await self.evaluate()
        finally:
            if self.step > step_metrics.version:  # it is trained, and is told of, whatever fails after that
                self.record.metrics(self.step, {**step_metrics.row(*self.watch.lap()), **evaluated, **self.counts()})
                self.show(self.step, step_metrics.groups)
        if why := too_many_failed(step_metrics.rollouts, schedule.max_reward_error_share):
            raise RewardsFailed(f"in step {self.step}, {why}")
        self.skips.check()
        if self.step == schedule.max_steps or self.save_due(self.step):
            await self.save_trained()

    async def save_trained(self) -> None:
        """Save the step, unless that was tried before."""
        await self.save(self.step)

    async def train_minibatch(self, num_groups: int, step_metrics: StepMetrics, ends_step: bool) -> None:
        """One optimizer step. While the trainer works on a chunk, the next one is generated, taken and scored; while
        the policy holds the trainer, all other chunks are, too, and then they go to it as one."""
        groups, loss_denominator = list[RolloutGroup](), 0.0
        async with PipelinedTask(on_error=self.buffer.fail) as training:
            while len(groups) < num_groups:
                chunk = await self.take(num_groups - len(groups), num_groups)
                samples = list[Sample]()
                while chunk:
                    groups += chunk
                    built = await self.score(chunk)
                    loss_denominator += self.sample_builder.loss_denominator(built)
                    samples += built
                    chunk = await self.take_while_held(training, num_groups - len(groups), num_groups)
                if samples:
                    await training.start(self.forward_backward(samples))
                    self.accounting.sends()
        # The weights and the books of what they were trained on belong together.
        await undisturbed(self.update(groups, loss_denominator, step_metrics, ends_step))

    async def update(
        self, groups: Sequence[RolloutGroup], loss_denominator: float, step_metrics: StepMetrics, ends_step: bool
    ) -> None:
        """The optimizer uses what has been accumulated from the groups."""
        await self.save.update_begins()
        report = None
        if loss_denominator:
            with self.watch("optim_step"):
                report = await self.trainer.optim_step(loss_denominator)
            self.skips.note(report)
        else:
            sentence = (
                f"Step {self.step + 1} learns nothing: in each of its {len(groups)} groups all rewards are equal."
            )
            self.record.event(NothingToLearn(sentence=sentence))
            await self.trainer.optim_step(0.0)  # the learning rate follows the batches
        self.buffer.mark_trained(groups)
        step_metrics.add(groups, report)
        if ends_step:
            self.step += 1
            self.save.step_ends(self.step)

    async def score(self, chunk: Sequence[RolloutGroup]) -> list[Sample]:
        """Turn groups into the samples that are trained on."""
        self.accounting.scoring_begins(chunk)
        with self.watch("score"):
            samples = await self.sample_builder.build(chunk)
        self.accounting.scoring_ends(is_trained_on=bool(samples))
        if self.scorer and self.controller:
            self.controller.notify()
        return samples

    async def take_while_held(self, training: PipelinedTask, wanted: int, groups_per_update: int) -> list[RolloutGroup]:
        """The next chunk, if the policy holds the trainer: the policy may wait until all is scored, and nothing else
        would ask for that. Empty once the trainer has done what it has, or nothing is wanted."""
        if self.scorer is None or self.controller is None or not wanted:
            return []
        pause = self.controller.training_pause
        while not training.idle.is_set() and await cancel_on(training.idle, pause.begun.wait()):
            if chunk := await cancel_on(pause.over, self.take(wanted, groups_per_update)):
                return chunk
        return []

    async def take(self, wanted: int, groups_per_update: int) -> list[RolloutGroup]:
        with self.watch("wait"):
            return await self.buffer.take(
                wanted,
                groups_per_update=groups_per_update,
                num_ranks=self.trainer.num_ranks,
                per_rank=self.trainer.micro_batches_per_rank,
                seq_len=self.schedule.seq_len,
                soon=self.rollouts.num_soon,
            )

    async def forward_backward(self, samples: Sequence[Sample]) -> None:
        self.accounting.sent()
        with self.watch("forward_backward"):
            await self.trainer.forward_backward(samples, self.schedule.seq_len)

    async def make_live(self, version: int, receiving: PipelinedTask, *, evaluates: bool) -> None:
        """The trainer's weights become the generators', while the trainer goes on with what is there to train on.

        Slots begin to change roles before that; nothing is decided about them until it is done.
        """
        self.accounting.evaluation_comes(self.evaluation.num_completions if self.evaluation and evaluates else 0)
        self.buffer.next_version(version)
        if self.controller:
            await receiving.finish()  # slots change roles for one version at a time
            await self.controller.begin_step(version)
        with self.watch("publish"):
            manifest = await self.trainer.publish(version)
        await receiving.start(self.receive(manifest))
        if self.scorer:
            await receiving.finish()  # what is trained next is scored by the same weights

    async def receive(self, manifest: Manifest) -> None:
        if self.controller:
            with self.watch("begin_step"):
                await self.controller.joined()
        with self.watch("receive"):
            receivers = [self.generators, self.scorer] if self.scorer else [self.generators]
            await gather_all(*(receiver.receive(manifest) for receiver in receivers))
        self.rollouts.now_live(manifest.version)
        await self.trainer.withdraw(manifest.version)
        if self.controller:
            self.controller.go_on()

    async def evaluate(self) -> dict[str, float]:
        """Held-out rewards of the current weights, as metrics. Nothing is published meanwhile. `stop` cuts it short."""
        self.accounting.evaluation_begins()
        report = None
        if self.evaluation is not None and not self.stop.is_set():
            with self.watch("evaluate"):
                report = await cancel_on(self.stop, self.evaluation.run(self.step))
        self.accounting.evaluation_ends()
        return report.metrics() if report else {}
