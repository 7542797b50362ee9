"""What a run leaves of its steps: a row of metrics and some samples of each, and checkpoints."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from ductile.core.batch.rewards import too_many_failed
from ductile.events.phases import EvaluatePhase, OptimStepPhase, PublishPhase, StepListener, StepPhase
from ductile.events.steps import NothingToLearn
from ductile.observe import Recorder, Stopwatch
from ductile.orchestrator.ending.meaning import Beginning
from ductile.orchestrator.ending.progress import Progress
from ductile.orchestrator.ending.save_once import SaveOncePerStep
from ductile.orchestrator.ending.saving import Saver
from ductile.orchestrator.loop.buffer import Buffer
from ductile.orchestrator.loop.evaluate import RewardsFailed
from ductile.orchestrator.loop.run_schedule import RunSchedule
from ductile.orchestrator.loop.samples import sample_rows
from ductile.orchestrator.loop.skipped_steps import SkippedSteps
from ductile.orchestrator.loop.step_metrics import StepMetrics
from ductile.tasks.conversation import ChatTokenizer


class Counted(Protocol):
    def counts(self) -> Mapping[str, float]:
        """Return metrics of the run so far."""
        ...


class RunOutput(StepListener):
    def __init__(
        self,
        record: Recorder,
        schedule: RunSchedule,
        buffer: Buffer,
        tokenizer: ChatTokenizer,
        *,
        num_samples: int = 0,
        counted: Sequence[Counted] = (),
        saver: Saver | None = None,
        began: Beginning | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """num_samples: rollouts of each step that are kept for people to read. counted: what has metrics of its own.
        saver: None writes no checkpoints. began: where the run began or went on. clock: of the metrics."""
        self.save = SaveOncePerStep(self._write_checkpoint, buffer.version, record)
        """Saves a step, unless that was tried before."""
        self._record, self._schedule, self._buffer, self._saver = record, schedule, buffer, saver
        self._tokenizer, self._num_samples, self._counted = tokenizer, num_samples, counted
        self.began = began or Beginning(Progress(buffer.version))
        self._watch = Stopwatch(clock)
        self._metrics = StepMetrics(buffer.version)
        self._evaluated: Mapping[str, float] = {}
        """Metrics of the latest evaluation; empty once they are in a row."""
        self._published: Mapping[str, float] = {}
        """Bytes of the weights that were published last; empty once they are in a row."""
        self._skips = SkippedSteps(schedule.max_skipped_steps, record, table="trainer.")

    def on_phase_begin(self, phase: StepPhase) -> None:
        if not _learns_nothing(phase):
            self._watch.begin(phase.name)
        elif isinstance(phase, OptimStepPhase):
            num_groups = len(phase.groups)
            sentence = f"Step {phase.step} learns nothing: in each of its {num_groups} groups all rewards are equal."
            self._record.event(NothingToLearn(sentence=sentence))

    def on_phase_end(self, phase: StepPhase) -> None:
        if not _learns_nothing(phase):
            self._watch.end(phase.name)
        match phase:
            case OptimStepPhase(report=report) if report is not None:
                if phase.loss_denominator:
                    self._skips.note(report)
                self._metrics.add(phase.groups, report if phase.loss_denominator else None)
            case PublishPhase(num_bytes=num_bytes):
                self._published = {"published_bytes": float(num_bytes)} if num_bytes else {}
            case EvaluatePhase(metrics=metrics):
                self._evaluated = metrics or {}
            case _:
                pass

    def begin(self, step: int) -> None:
        """Training is about to begin or to go on after `step`. Write what the evaluation before that has found."""
        if step == 0 or self._evaluated:
            self._record.add_metrics(step, self._evaluated)
        self._evaluated = {}
        self._watch.lap()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Follow the block that trains `step`, from 1 on, and evaluates it. Once it is trained, its row and samples
        are written, whatever fails after that. Raises RewardsFailed or Diverged where it is of no use to go on."""
        self._metrics = StepMetrics(step - 1)
        try:
            yield
        finally:
            if self._metrics.num_updates == self._schedule.n_minibatches:
                self._write(step)
        if why := too_many_failed(self._metrics.rollouts, self._schedule.max_reward_error_share):
            raise RewardsFailed(f"in step {step}, {why}")
        self._skips.check()

    def save_due(self, step: int) -> bool:
        """Return whether to save `step`, which has just been trained."""
        return step == self._schedule.max_steps or (self._saver is not None and self._saver.is_due(step))

    def _write(self, step: int) -> None:
        metrics, evaluated, self._evaluated = self._metrics, self._evaluated, {}
        counts = {name: count for each in self._counted for name, count in each.counts().items()}
        row = metrics.row(*self._watch.lap())
        self._record.metrics(step, {**row, **self._published, **evaluated, **counts})
        self._published = {}
        self._record.samples(step, sample_rows(metrics.groups, self._tokenizer, self._num_samples))

    async def _write_checkpoint(self, step: int) -> None:
        if self._saver is not None:
            position, per_step = self._buffer.position(), self._schedule.n_minibatches
            await self._saver.save(self.began.progress.after(step, position, per_step))


def _learns_nothing(phase: StepPhase) -> bool:
    """Return whether the phase is an optimizer step without samples: it takes no time, and is no measure of others."""
    return isinstance(phase, OptimStepPhase) and not phase.loss_denominator
