"""The loop's roles in memory, in virtual time: seconds pass only while all tasks wait."""

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ductile.concurrency.deadline import Deadline
from ductile.concurrency.structured import Pause
from ductile.core.batch.advantage import Advantage, mean_baseline
from ductile.core.rollouts.provenance import KnownWeights
from ductile.core.rollouts.staleness import OnStale, StalenessBound
from ductile.elastic.controller import ElasticController
from ductile.elastic.step_accounting import StepAccounting
from ductile.observe import Recorder
from ductile.orchestrator.ending.progress import Checkpoints
from ductile.orchestrator.ending.saving import Saver
from ductile.orchestrator.loop.assembly import assemble
from ductile.orchestrator.loop.buffer import Buffer
from ductile.orchestrator.loop.episode import Episodes
from ductile.orchestrator.loop.evaluate import Evaluation
from ductile.orchestrator.loop.rollouts import Rollouts
from ductile.orchestrator.loop.run_output import RunOutput
from ductile.orchestrator.loop.run_schedule import RunSchedule
from ductile.orchestrator.loop.sample_builder import SampleBuilder
from ductile.records import GenerateRequest, Generation, Manifest, Prompt, Sampling, StepReport
from ductile.roles import Task
from ductile.sim.clock import VirtualTimeLoop
from ductile.sim.clock import now_s as clock
from ductile.tasks.grader import Graded, TaskReply
from ductile.tasks.prompts import ExampleOrder, PromptPosition, Prompts
from ductile.tasks.task import score


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` in virtual time. A task that is still alive at the end is an error."""
    loop = VirtualTimeLoop()
    try:
        result = loop.run_until_complete(work)
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        assert not left, f"left running: {left}"
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


class Letters:
    """A tokenizer: a token a character, 0 ends a turn. No chat template."""

    chat_template = None
    eos_token_ids = (0,)

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(token) for token in token_ids if token)


class Count(Task):
    """Example `i` asks "i"; the completion's last digit is its reward."""

    name = "count"

    def __init__(self, size=100):
        self.size = size

    def __len__(self):
        return self.size

    def messages(self, example):
        return [{"role": "user", "content": str(example)}]

    def reward(self, example, completion):
        return float(completion[-1]) if completion else 0.0


class InProcessGraders:
    """`Graders` without processes."""

    def __init__(self, tasks):
        self.tasks = tasks

    def counts(self):
        return {"reward_errors": 0.0}

    async def reward(self, task, example, completion):
        return Graded(*score(self.tasks[task], example, completion))

    async def reply(self, task, example, messages):
        return TaskReply(self.tasks[task].reply(example, messages))


@dataclass
class Diary:
    """Who did what when, in order."""

    lines: list[tuple[float, str]] = field(default_factory=list)

    def note(self, what):
        self.lines.append((clock(), what))

    def what(self, *starts):
        return [what for _, what in self.lines if what.startswith(starts)]


class FakeTrainer:
    def __init__(self, diary, num_ranks=1, micro_batches_per_rank=1, chunk_s=0.5, optim_s=0.1, skips=()):
        self.diary, self.num_ranks, self.chunk_s, self.optim_s = diary, num_ranks, chunk_s, optim_s
        self.micro_batches_per_rank = micro_batches_per_rank
        self.samples, self.loss_denominators, self.steps, self.busy = [], [], 0, False
        self.fail_at: int | None = None
        self.skips = skips
        self.pause = Pause()

    async def forward_backward(self, samples, seq_len):
        assert not self.busy, "two forward_backward at once"
        assert all(len(sample) <= seq_len for sample in samples)
        self.diary.note(f"forward_backward {len(samples)}")
        self.busy = True
        try:
            await asyncio.sleep(self.chunk_s)
        finally:
            self.busy = False
        if self.fail_at is not None and self.steps >= self.fail_at:
            raise RuntimeError("slot 0 (train) was killed by SIGKILL while it ran ForwardBackward")
        self.samples += samples
        self.diary.note("forward_backward done")

    async def optim_step(self, loss_denominator):
        assert not self.busy, "optim_step before forward_backward was done"
        self.steps += 1
        if loss_denominator == 0:
            return StepReport(self.steps, loss=0.0, grad_norm=0.0, lr=1e-3, num_tokens=0)
        self.loss_denominators.append(loss_denominator)
        await asyncio.sleep(self.optim_s)
        self.diary.note("optim_step")
        skipped = {"skipped": 1.0} if self.steps in self.skips else {}
        return StepReport(self.steps, 1.0, grad_norm=0.5, lr=1e-3, num_tokens=int(loss_denominator), metrics=skipped)

    async def publish(self, version):
        self.diary.note(f"publish {version}")
        return Manifest(version, "shared_memory", "nowhere", 0, 0, ())

    async def withdraw(self, version):
        self.diary.note(f"withdraw {version}")

    async def save(self, path):
        self.diary.note("save")

    async def load(self, path):
        self.diary.note("load")

    async def export(self, path, dtype):
        self.diary.note("export")


class FakeGenerators:
    """Samples one token a `token_s`; the last one is `digit(request)`, all carry the version live when sampled."""

    def __init__(self, diary, capacity=8, delay=lambda request: 1.0, digit=None, receive_s=0.05, num_tokens=2):
        self.diary, self.capacity, self.delay, self.receive_s = diary, capacity, delay, receive_s
        self.num_tokens = num_tokens
        counter = itertools.count()
        self.digit = digit or (lambda request: next(counter) % 10)
        self.version = -1
        self.requests: list[GenerateRequest] = []
        self.num_running = self.max_running = self.num_aborted = 0

    async def generate(self, request):
        assert self.version >= 0, "asked before the first weights were live"
        self.requests.append(request)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        tokens, versions = [], []
        self.diary.note(f"start {request.group}")
        try:
            for _ in range(self.num_tokens):
                versions.append(self.version)
                await asyncio.sleep(self.delay(request) / self.num_tokens)
                tokens.append(ord("x"))
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1
        tokens[-1] = ord("0") + self.digit(request)
        return Generation(request.id, tuple(tokens), (-0.5,) * len(tokens), tuple(versions), "stop")

    async def receive(self, manifest):
        await asyncio.sleep(self.receive_s)
        self.version = manifest.version
        self.diary.note(f"live {manifest.version}")
        return KnownWeights.of(manifest)


class FakeScorer:
    def __init__(self, diary, score_s=0.2):
        self.diary, self.score_s, self.version = diary, score_s, -1

    async def score(self, samples, model):
        self.diary.note(f"score {model} with version {self.version}")
        await asyncio.sleep(self.score_s)
        value = -0.25 if model == "policy" else -1.0
        return [(0.0,) + (value,) * (len(sample) - 1) for sample in samples]

    async def receive(self, manifest):
        self.version = manifest.version
        return KnownWeights.of(manifest)


class NotingSaver:
    """`Saver` of a stage: notes what it saves, and really saves it where the stage has checkpoints."""

    def __init__(self, stage):
        self.stage = stage

    def is_due(self, step):
        return self.stage.save_interval is not None and step % self.stage.save_interval == 0

    async def save(self, progress):
        stage = self.stage
        stage.diary.note(f"checkpoint {progress.step}")
        if stage.checkpoints:
            await Saver(stage.fake_trainer, stage.checkpoints, stage.record, model_folder=None).save(progress)
        stage.saved.append((progress.step, progress.prompts))


@dataclass
class Stage:
    """A whole loop in memory. Change what a test is about, then `run(stage.go())`."""

    folder: Any
    max_steps: int = 3
    groups_per_step: int = 4
    group_size: int = 2
    n_minibatches: int = 1
    max_async_level: int = 1
    max_off_policy_steps: int = 8
    on_stale: OnStale = "drop"
    eval_prompts: int = 0
    eval_interval: int | None = None
    save_interval: int | None = None
    seq_len: int = 16
    num_examples: int = 100
    timeout_s: float = 1000.0
    step: int = 0
    position: PromptPosition | None = None
    trainer: Callable[..., FakeTrainer] = FakeTrainer
    generators: Callable[..., FakeGenerators] = FakeGenerators
    scorer: Callable[..., FakeScorer] | None = None
    graders: Callable[..., Any] = InProcessGraders
    max_reward_error_share: float = 1.0
    max_skipped_steps: int | None = 10
    needs_reference: bool = False
    drop_zero_advantage: bool = True
    advantage: Advantage = mean_baseline
    death: Callable[[], Coroutine[Any, Any, str]] | None = None
    """Returns when a process that the run needs is gone."""
    controller: Callable[["Stage"], ElasticController] | None = None
    saver: Callable[["Stage"], Any] = NotingSaver
    checkpoints: Checkpoints | None = None
    """Where the trainer's state is really saved; None notes that it would be."""
    diary: Diary = field(default_factory=Diary)
    saved: list[tuple[int, PromptPosition]] = field(default_factory=list)
    trained: list[tuple[int, Prompt]] = field(default_factory=list)

    async def go(self, during: Callable[["Stage"], Coroutine[Any, Any, None]] | None = None) -> int:
        self.stop = asyncio.Event()
        self.record = Recorder(self.folder, clock=lambda: 0.0)
        self.fake_trainer, self.fake_generators = self.trainer(self.diary), self.generators(self.diary)
        self.fake_scorer = self.scorer(self.diary) if self.scorer else None
        task, tokenizer = Count(self.num_examples), Letters()
        tasks = {"train": task}
        prompts = Prompts(task, tokenizer, ExampleOrder(range(self.num_examples), seed=1), 32, self.position)
        mark_trained, step_of = prompts.mark_trained, lambda: self.loop.step

        def note_trained(prompt):
            self.trained.append((step_of(), prompt))
            mark_trained(prompt)

        prompts.mark_trained = note_trained
        schedule = RunSchedule(
            max_steps=self.max_steps,
            staleness=StalenessBound(
                self.groups_per_step, self.max_async_level, self.max_off_policy_steps, self.on_stale
            ),
            group_size=self.group_size,
            n_minibatches=self.n_minibatches,
            seq_len=self.seq_len,
            eval_interval=self.eval_interval,
            max_reward_error_share=self.max_reward_error_share,
            max_skipped_steps=self.max_skipped_steps,
        )
        self.buffer = Buffer(
            prompts,
            schedule.staleness,
            self.record,
            version=self.step,
            max_steps=self.max_steps,
            timeout_s=Deadline(self.timeout_s, "cluster.group_timeout_s"),
            stop=self.stop,
        )
        graders = self.graders(tasks)
        episodes = Episodes(tasks, tokenizer, self.fake_generators, graders, max_len_tokens=64)
        self.rollouts = Rollouts(self.buffer, episodes, self.fake_generators, Sampling(), self.group_size)
        held_out = [Prompt(f"eval/0/{i}", "train", i, (ord("7"),)) for i in range(self.eval_prompts)]
        evaluation = Evaluation(episodes, held_out, Sampling(temperature=0), self.record)
        sample_builder = SampleBuilder(
            self.fake_scorer,
            advantage=self.advantage,
            needs_reference=self.needs_reference,
            drop_zero_advantage=self.drop_zero_advantage,
        )
        output = RunOutput(
            self.record,
            schedule,
            self.buffer,
            tokenizer,
            num_samples=1,
            counted=(self.buffer, graders),
            saver=self.saver(self),
        )
        self.accounting = StepAccounting(
            schedule.step_size(scores=self.fake_scorer is not None), self.buffer, self.rollouts
        )
        self.loop = assemble(
            schedule,
            self.fake_trainer,
            self.rollouts,
            sample_builder,
            evaluation if held_out else None,
            output,
            self.accounting,
            self.controller(self) if self.controller else None,
            self.stop,
        )
        meanwhile = asyncio.create_task(during(self)) if during else None
        try:
            return await self.loop.run(self.death() if self.death else None)
        finally:
            if meanwhile:
                await meanwhile
            self.record.close()


def random_delays(seed: int, longest_s: float = 6.0) -> Callable[[GenerateRequest], float]:
    """A delay a request, skewed: most are short, some are very long."""
    draw = random.Random(seed)
    return lambda request: longest_s * draw.random() ** 4


def write(folder: str, text: str) -> None:
    """A trainer's state, for trainers that have none."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "shard").write_text(text)


def read(folder: str) -> str:
    return (Path(folder) / "shard").read_text()
