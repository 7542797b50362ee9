"""Turns a config into a running RL loop. `prepare` reads and checks, before any process starts; `run_loop` runs.

prepared = prepare(config)                         tokenizer, tasks, where to resume; raises what is wrong
... start the slots with `prepared.trainer`, which knows how many optimizer steps there will be ...
result = await run_loop(prepared, trainer, generators, scorer, RunContext(record, stop, ...))
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ductile.columns import TokenIds
from ductile.config.reading.command_line import as_sentence
from ductile.config.reading.imports import ImportPathError, import_object
from ductile.config.schema.bench import num_steps
from ductile.config.schema.orchestrator import AdvantageConfig, to_sampling
from ductile.config.schema.run import RLConfig
from ductile.config.schema.trainer import TrainerConfig, loss_aggregation, needs_reference
from ductile.core.batch.advantage import ADVANTAGES, Advantage
from ductile.core.layout.model.peak import arithmetic_of, compute_dtype
from ductile.core.rollouts.provenance import LIMITS
from ductile.core.rollouts.staleness import StalenessBound
from ductile.elastic.controller import ElasticController
from ductile.elastic.step_accounting import StepAccounting
from ductile.events.rollouts import DataNoted, PromptSkipped
from ductile.observe import Recorder, read_jsonl
from ductile.orchestrator.commands.graders import graders_of
from ductile.orchestrator.commands.reference import pinned
from ductile.orchestrator.commands.run_context import RunContext
from ductile.orchestrator.commands.run_meaning import rl_meaning
from ductile.orchestrator.ending.meaning import Beginning, going_on
from ductile.orchestrator.ending.progress import Checkpoints, Progress
from ductile.orchestrator.ending.run_summary import since_start, summarise_rl
from ductile.orchestrator.ending.run_until import run_until
from ductile.orchestrator.ending.save_once import saved_when
from ductile.orchestrator.ending.saving import Saver, where_to_begin
from ductile.orchestrator.loop.assembly import assemble
from ductile.orchestrator.loop.buffer import Buffer
from ductile.orchestrator.loop.canaries import Canaries, CheckedGenerators, PolicyScorer, Reference, ScorerReference
from ductile.orchestrator.loop.episode import Episodes
from ductile.orchestrator.loop.evaluate import EvalReport, Evaluation
from ductile.orchestrator.loop.loop import PausableTrainer
from ductile.orchestrator.loop.rollouts import Rollouts
from ductile.orchestrator.loop.run_output import RunOutput
from ductile.orchestrator.loop.run_schedule import RunSchedule
from ductile.orchestrator.loop.sample_builder import SampleBuilder
from ductile.records import Prompt
from ductile.roles import Generators, Scorer, Task
from ductile.tasks.build import build_task
from ductile.tasks.jsonl import JsonlDataset
from ductile.tasks.prompts import ExampleOrder, Prompts, check_prompts, pass_in_words, prompt_ids, repeated, split
from ductile.tasks.task import TaskError
from ductile.tasks.tokenizer import Tokenizer
from ductile.transport.deadlines import Deadlines


@dataclass(frozen=True, slots=True)
class Prepared:
    config: RLConfig
    schedule: RunSchedule
    tokenizer: Tokenizer
    tasks: Mapping[str, Task]
    """Tasks by `Prompt.task`: "train", and "eval" where evaluation has a task of its own."""
    train_examples: Sequence[int]
    eval_prompts: Sequence[Prompt]
    advantage: Advantage
    checkpoints: Checkpoints
    began: Beginning

    @property
    def progress(self) -> Progress:
        return self.began.progress

    @property
    def trainer(self) -> TrainerConfig:
        """The trainer's config as the train slots need it: its `max_steps` counts optimizer steps."""
        num_updates = self.progress.updates_by(self.schedule.max_steps, self.schedule.n_minibatches)
        return self.config.trainer.model_copy(update={"max_steps": num_updates})

    def notes(self) -> list[str]:
        """Return sentences about the data: where a run of one pass does not ask each prompt once, where the chat
        template writes today's date, where prompts spell control tokens, where held-out rows of a file are trained
        on, too."""
        schedule, is_one_pass = self.schedule, not _given_steps(self.config) and self.config.bench is None
        groups, size = schedule.staleness.groups_per_step, len(self.train_examples)
        passed = pass_in_words(size, schedule.max_steps, groups, "prompt") if is_one_pass else ""
        spelled = check_prompts(self.tasks["train"], self.tokenizer, self.train_examples)
        found = (passed, self.tokenizer.dated, spelled, self._repeated())
        return [as_sentence(sentence) for sentence in found if sentence]

    def _repeated(self) -> str:
        train, held_out = self.tasks["train"], [prompt.example for prompt in self.eval_prompts]
        task = self.tasks[self.eval_prompts[0].task] if held_out else train
        if not isinstance(train, JsonlDataset) or not isinstance(task, JsonlDataset):
            return ""  # what a procedural task hides may differ where its prompts do not
        return repeated(train, self.train_examples, task, held_out)

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)


@dataclass(frozen=True, slots=True)
class RunResult:
    summary: Mapping[str, Any]
    last: EvalReport | None
    """Latest evaluation since the start or resume; None when there was none."""
    model_folder: Path | None
    """The HF folder, when one was written."""


def prepare(config: RLConfig) -> Prepared:
    """Everything that can be wrong with data and checkpoints is found here.

    Raises TaskError, TokenizerError, ImportPathError or CheckpointError, each with a sentence.
    """
    orchestrator, bench = config.orchestrator, config.bench is not None
    tokenizer = Tokenizer.of(config.inference.model)
    assert orchestrator.task is not None, "preflight asks for a task"
    tasks = {"train": build_task(orchestrator.task)}
    train_examples: Sequence[int] = range(len(tasks["train"]))
    eval_prompts: list[Prompt] = []
    name, held_out = "train", range(0)
    if orchestrator.eval.enabled and not bench:
        if orchestrator.eval.task is None:
            train_examples, held_out = split(len(tasks["train"]), orchestrator.eval.num_examples)
        else:
            name, tasks["eval"] = "eval", build_task(orchestrator.eval.task)
            held_out = range(min(len(tasks["eval"]), orchestrator.eval.num_examples))
        eval_prompts = _eval_prompts(tokenizer, tasks[name], name, held_out, config.inference.model.max_model_len)
    check_prompts(tasks["train"], tokenizer, train_examples)  # what raises is found before the start
    groups_per_step = orchestrator.batch_size // orchestrator.rollouts_per_example
    one_epoch = max(1, len(train_examples) // groups_per_step)
    max_steps = num_steps(config.bench) if config.bench else _given_steps(config) or one_epoch
    checkpoints = Checkpoints(Path(config.output_dir) / "state", config.ckpt.keep_last)
    resume_step = None if bench else config.ckpt.resume_step
    progress = where_to_begin(checkpoints, resume_step, Path(config.output_dir) / "model")
    if needs_reference(config.trainer.loss):
        reference = pinned(progress, Path(str(config.trainer.model.name)), checkpoints.path(progress.step))
        progress = replace(progress, reference=reference)
    schedule = RunSchedule(
        max_steps=max_steps,
        staleness=StalenessBound(
            groups_per_step, orchestrator.max_async_level, orchestrator.max_off_policy_steps, orchestrator.on_stale
        ),
        group_size=orchestrator.rollouts_per_example,
        n_minibatches=orchestrator.n_minibatches,
        seq_len=config.trainer.model.seq_len,
        eval_interval=orchestrator.eval.interval,
        max_reward_error_share=orchestrator.graders.max_error_share,
        max_skipped_steps=config.trainer.optim.max_skipped_steps,
    )
    began = Beginning(progress)
    if not bench:
        was_due = bool(eval_prompts) and progress.step > 0 and schedule.evaluates_after(progress.step)
        meaning = rl_meaning(config, tokenizer, tasks, train_examples, (name, held_out))
        began = going_on(progress, meaning, max_steps, schedule.n_minibatches, Path(config.output_dir))
        began = began.measured(was_due and _lacks_evaluation(Path(config.output_dir), progress.step))
    return Prepared(
        config=config,
        schedule=schedule,
        tokenizer=tokenizer,
        tasks=tasks,
        train_examples=train_examples,
        eval_prompts=eval_prompts,
        advantage=_advantage(orchestrator.advantage),
        checkpoints=checkpoints,
        began=began,
    )


def _lacks_evaluation(folder: Path, step: int) -> bool:
    """Return whether a run's metrics do not have the evaluation of the weights after `step`."""
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row.get("step") == step]
    return not any("eval_reward" in row for row in rows)


def _given_steps(config: RLConfig) -> int | None:
    return config.max_steps or config.trainer.max_steps or config.orchestrator.max_steps


async def run_loop(
    prepared: Prepared,
    trainer: PausableTrainer,
    generators: Generators,
    scorer: Scorer | None,
    context: RunContext,
    begin_scheduling: Callable[[Buffer, StepAccounting], ElasticController | None] = lambda buffer, accounting: None,
    spent: Callable[[], Mapping[str, object]] = dict,
    canaries: Canaries | None = None,
) -> RunResult:
    """Run until `max_steps` or `context.stop`; writes metrics, checkpoints, `model/` and `summary.json`.

    begin_scheduling: told of the step's books before the loop begins; returns the controller that moves slots between
    roles meanwhile, or None.
    spent: what the slots did with their time, for the summary. canaries: check each version that goes live.
    Raises what a role raises (a `Failure`), SlotDied, CustomCodeFailed, and TaskError when a task cannot be
    made in a grader; what was trained is saved by then.
    """
    config, progress, record = prepared.config, prepared.progress, context.record
    orchestrator, saves = config.orchestrator, config.bench is None
    for sentence in prepared.notes():
        record.event(DataNoted(sentence=sentence))
    model_folder = prepared.folder / "model" if config.ckpt.export_model and saves else None
    saver = Saver(trainer, prepared.checkpoints, record, model_folder, config.ckpt)
    if saves:
        await run_until(
            saver.resume(progress, config.ckpt.resume_step is not None, prepared.began.changes),
            death=context.death_watch(),
        )
    earlier_s = sum(row.get("step_s") or 0.0 for row in record.rows())
    eval_task = orchestrator.eval.task if "eval" in prepared.tasks else None
    tasks = {"train": orchestrator.task, "eval": eval_task}
    async with graders_of(tasks, orchestrator.graders, record) as graders:
        max_len_tokens = config.inference.model.max_model_len
        episodes = Episodes(prepared.tasks, prepared.tokenizer, generators, graders, max_len_tokens)
        buffer = _buffer(prepared, record, context.stop)
        sampling, group_size = to_sampling(orchestrator.sampling), orchestrator.rollouts_per_example
        rollouts = Rollouts(buffer, episodes, generators, sampling, group_size)
        accounting = StepAccounting(prepared.schedule.step_size(scores=scorer is not None), buffer, rollouts)
        evaluation = _evaluation(prepared, episodes, record)
        output = RunOutput(
            record,
            prepared.schedule,
            buffer,
            prepared.tokenizer,
            num_samples=orchestrator.num_samples_kept,
            counted=(buffer, graders, context, *([canaries] if canaries else [])),
            saver=saver if saves else None,
            began=prepared.began,
        )
        loop = assemble(
            prepared.schedule,
            trainer,
            rollouts,
            _sample_builder(prepared, scorer),
            evaluation if prepared.eval_prompts else None,
            output,
            accounting,
            begin_scheduling(buffer, accounting),
            context.stop,
        )
        async with canaries or nullcontext(), saved_when(context.save_soon, output.save):
            if canaries:
                loop.publisher.on_live.add(canaries.check_soon)
            step = await loop.run(context.death_watch())
    since_start_s = context.wall_s()
    summary = summarise_rl(record.rows(), context.slots(), earlier_s + since_start_s, progress.measured_from)
    summary |= {"steps": step, **since_start(prepared.schedule.max_steps, progress.step, since_start_s), **spent()}
    record.summary(summary)
    return RunResult(
        summary=summary,
        last=evaluation.last,
        model_folder=model_folder if model_folder and model_folder.exists() else None,
    )


def canaries_of(
    prepared: Prepared,
    generators: CheckedGenerators,
    trainer: Reference,
    scorer: PolicyScorer | None,
    device: str,
    record: Recorder,
) -> Canaries | None:
    """The canaries of a run whose slots are on such a device; None where the config wants none. Raises TaskError."""
    config = prepared.config
    examples = prepared.train_examples[: config.orchestrator.canaries]
    if config.bench or not examples:
        return None
    model, inference = config.trainer.model, config.inference.model
    computes = (model.compute_dtype, None if inference.dtype == "auto" else inference.dtype)
    exact = all(
        arithmetic_of(compute_dtype(dtype, device), config.trainer.matmul_precision, device) == "float32"
        for dtype in computes
    )
    task, most = prepared.tasks["train"], inference.max_model_len // 2
    return Canaries(
        [TokenIds(prompt_ids(task, prepared.tokenizer, example)[:most]) for example in examples],
        to_sampling(config.orchestrator.sampling),
        generators,
        ScorerReference(scorer) if scorer else trainer,
        LIMITS["float32" if exact else "bfloat16"],
        record,
    )


def _evaluation(prepared: Prepared, episodes: Episodes, record: Recorder) -> Evaluation:
    config = prepared.config.orchestrator
    return Evaluation(
        episodes,
        prepared.eval_prompts,
        to_sampling(config.eval.sampling),
        record,
        config.eval.samples_per_example,
        max_reward_error_share=config.graders.max_error_share,
    )


def _buffer(prepared: Prepared, record: Recorder, stop: asyncio.Event) -> Buffer:
    orchestrator, progress, cluster = prepared.config.orchestrator, prepared.progress, prepared.config.cluster
    prompts = Prompts(
        prepared.tasks["train"],
        prepared.tokenizer,
        ExampleOrder(prepared.train_examples, orchestrator.seed, orchestrator.shuffle),
        prepared.config.inference.model.max_model_len - 1,
        progress.prompts,
        on_too_long=lambda sentence: record.event(PromptSkipped(sentence=sentence)),
    )
    return Buffer(
        prompts,
        prepared.schedule.staleness,
        record,
        version=progress.step,
        max_steps=prepared.schedule.max_steps,
        timeout_s=Deadlines.of(cluster).group_s,
        stop=stop,
    )


def _sample_builder(prepared: Prepared, scorer: Scorer | None) -> SampleBuilder:
    loss, orchestrator = prepared.config.trainer.loss, prepared.config.orchestrator
    return SampleBuilder(
        scorer,
        advantage=prepared.advantage,
        loss_aggregation=loss_aggregation(loss),
        temperature=orchestrator.sampling.temperature,
        # A benchmark is of steps that train on whole batches, whatever an untrained model earns.
        drop_zero_advantage=orchestrator.drop_zero_advantage and prepared.config.bench is None,
        needs_reference=needs_reference(loss),
    )


def _advantage(config: AdvantageConfig) -> Advantage:
    if config.type != "custom":
        return ADVANTAGES[config.type]
    function: Any = import_object(str(config.import_path))
    if not callable(function):
        raise ImportPathError(f"orchestrator.advantage.import_path: {config.import_path} is not a function")
    return cast(Advantage, function)


def _eval_prompts(
    tokenizer: Tokenizer, task: Task, name: str, examples: Sequence[int], max_len_tokens: int
) -> list[Prompt]:
    """Held-out prompts that leave room for a completion. Raises TaskError when none does."""
    prompts = [
        Prompt(f"eval/0/{example}", name, example, TokenIds(prompt_ids(task, tokenizer, example)))
        for example in examples
    ]
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) < max_len_tokens]
    if prompts and not fitting:
        raise TaskError(f"every held-out prompt has {max_len_tokens} tokens or more (inference.model.max_model_len)")
    return fitting
