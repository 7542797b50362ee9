"""Training without generators: `ductile sft`, and `ductile trainer` on fake data. The same Trainer, the same metrics.

prepared = prepare_sft(config)  or  prepare_fake(config)
summary = await run_batches(prepared, trainer, RunContext(record, stop, slots))
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ductile.concurrency.structured import undisturbed
from ductile.config.checks.on_disk import read_spec
from ductile.config.schema.bench import num_steps
from ductile.config.schema.run import FakeData, JsonlData, SFTConfig, TrainerRunConfig
from ductile.config.schema.trainer import CheckpointConfig, SFTLoss, TrainerConfig, loss_aggregation
from ductile.core.batch.loss_aggregation import loss_denominator, weigh
from ductile.events.steps import BatchesReady
from ductile.observe import Stopwatch
from ductile.orchestrator.commands.run_context import RunContext
from ductile.orchestrator.commands.run_meaning import sft_meaning
from ductile.orchestrator.commands.sft_data import Conversations, fake_samples, marked, read_conversations
from ductile.orchestrator.ending.meaning import Beginning, going_on
from ductile.orchestrator.ending.progress import Checkpoints, Progress
from ductile.orchestrator.ending.run_summary import per_second, since_start
from ductile.orchestrator.ending.run_until import run_until
from ductile.orchestrator.ending.save_once import SaveOncePerStep, saved_in_the_end, saved_when
from ductile.orchestrator.ending.saving import Saver, where_to_begin
from ductile.orchestrator.loop.skipped_steps import SkippedSteps
from ductile.orchestrator.loop.step_metrics import utilisation
from ductile.records import AS_IN_SOURCE, ChatFormat, Sample, StepReport
from ductile.roles import TrainerClient
from ductile.tasks.prompts import ExampleOrder, PromptPosition, pass_in_words
from ductile.tasks.rows import Row
from ductile.tasks.tokenizer import Tokenizer
from ductile.user_files import read_text

MakeBatch = Callable[[int], list[Sample]]
"""The samples of a step, counted from 0. A resumed run asks for later steps only, and gets the same ones."""


@dataclass(frozen=True, slots=True)
class AboutData:
    """Facts about a data set, for people and for the summary."""

    sentence: str = ""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    first: str = ""
    """First sample as the model sees it (`sft_data.marked`)."""


@dataclass(frozen=True, slots=True)
class PreparedBatches:
    trainer: TrainerConfig
    batch: MakeBatch
    max_steps: int
    data: AboutData
    ckpt: CheckpointConfig = field(default_factory=CheckpointConfig)
    checkpoints: Checkpoints | None = None
    """Checkpoints of the run; None saves nothing."""
    began: Beginning = field(default_factory=lambda: Beginning(Progress()))
    model_folder: Path | None = None
    chat_format: ChatFormat = AS_IN_SOURCE
    """Chat format of the models that are saved."""

    @property
    def progress(self) -> Progress:
        return self.began.progress


def prepare_sft(config: SFTConfig) -> PreparedBatches:
    """Raises TaskError, TokenizerError or CheckpointError, each with a sentence."""
    data, bench = config.data, config.bench is not None
    checkpoints = None if bench else Checkpoints(Path(config.output_dir) / "state", config.ckpt.keep_last)
    progress, tokenizer, rows, num_samples = Progress(), None, tuple[Row, ...](), 0
    if checkpoints:
        progress = where_to_begin(checkpoints, config.ckpt.resume_step, Path(config.output_dir) / "model")
    if progress.step and not progress.prompts.next:  # earlier versions did not write it
        progress = replace(progress, prompts=PromptPosition(progress.step * data.batch_size))
    if bench or isinstance(data, FakeData):
        fake = data if isinstance(data, FakeData) else FakeData(batch_size=data.batch_size, seq_len=data.seq_len)
        batch = _fake_batch(fake, vocab_size=_vocab_size(str(config.model.name)))
        unread = "" if fake is data else "; --bench does not read data.path"
        one_epoch, about = 1, AboutData(f"Made-up data, {fake.batch_size} samples a step{unread}.")
    else:
        tokenizer = Tokenizer.of(config.model)
        longest = min(data.seq_len, spec.max_position if (spec := read_spec(config.model.name)) else data.seq_len)
        read = read_conversations(str(data.path), tokenizer, longest, data.loss_on)
        order = ExampleOrder(range(len(read.samples)), config.seed, data.shuffle)
        batch = _batch_of(read.samples, order, progress, data.batch_size)
        rows, num_samples = read.rows, len(read.samples)
        one_epoch = -(-len(read.samples) // data.batch_size)
        about = _about(read, data, longest, marked(tokenizer, read.samples[0]), tokenizer.dated)
        if not config.max_steps and progress.prompts.next == progress.step * data.batch_size:
            words = pass_in_words(num_samples, one_epoch, data.batch_size, "sample")
            about = replace(about, sentence=" ".join(filter(None, (about.sentence, words))))
    max_steps = num_steps(config.bench) if config.bench else config.max_steps or one_epoch
    began = Beginning(progress)
    if not bench:
        meaning = sft_meaning(config, tokenizer, rows, num_samples)
        began = going_on(progress, meaning, max_steps, 1, Path(config.output_dir))
    return PreparedBatches(
        trainer=TrainerConfig(
            model=config.model,
            optim=config.optim,
            scheduler=config.scheduler,
            loss=SFTLoss(),
            max_steps=max_steps,
            seed=config.seed,
            matmul_precision=config.matmul_precision,
            dist_timeout_seconds=config.dist_timeout_seconds,
            resize=config.resize,
        ),
        batch=batch,
        max_steps=max_steps,
        ckpt=config.ckpt,
        checkpoints=checkpoints,
        began=began,
        model_folder=Path(config.output_dir) / "model" if config.ckpt.export_model and not bench else None,
        chat_format=tokenizer.chat_format if tokenizer else AS_IN_SOURCE,
        data=about,
    )


def prepare_fake(config: TrainerRunConfig) -> PreparedBatches:
    """The trainer alone: samples as the RL loop would make them, for its own loss; nothing is saved."""
    assert config.data.fake is not None, "preflight asks for fake data"
    fake = config.data.fake
    vocab_size, for_rl = _vocab_size(str(config.model.name)), not isinstance(config.loss, SFTLoss)

    def batch(step: int) -> list[Sample]:
        samples = fake_samples(
            fake.batch_size,
            config.model.seq_len,
            vocab_size,
            step=step,
            variable=fake.generate_samples,
            random_ids=True,
            for_rl=for_rl,
        )
        return weigh(samples, loss_aggregation(config.loss))

    max_steps = num_steps(config.bench) if config.bench else config.max_steps or 1
    names = set(TrainerConfig.model_fields)
    trainer = TrainerConfig(**{name: value for name, value in config if name in names})
    return PreparedBatches(
        trainer=trainer.model_copy(update={"max_steps": max_steps}),
        batch=batch,
        max_steps=max_steps,
        data=AboutData(f"Made-up data, {fake.batch_size} samples a step."),
    )


async def run_batches(
    prepared: PreparedBatches,
    trainer: TrainerClient,
    context: RunContext,
) -> dict[str, Any]:
    """Train until `max_steps` or `context.stop`, save where that is wanted, and write and return the summary.

    Raises what the trainer raises, and SlotDied; what was trained is saved by then, if it can be.
    """
    record, saver = context.record, None
    if prepared.checkpoints is not None:
        saver = Saver(trainer, prepared.checkpoints, record, prepared.model_folder, prepared.ckpt)
        await run_until(
            saver.resume(prepared.progress, prepared.ckpt.resume_step is not None, prepared.began.changes),
            death=context.death_watch(),
        )
    record.event(BatchesReady(**prepared.data.counts, sentence=prepared.data.sentence))
    earlier_s = sum(row.get("step_s") or 0.0 for row in record.rows())
    training = _Training(prepared, trainer, saver, context)
    async with saved_when(context.save_soon, training.save):
        await saved_in_the_end(
            training.run(),
            lambda: training.save(training.step),
            training.save.when(context.stop),
            context.death_watch(),
        )
    rows = record.rows()
    since_start_s = context.wall_s()
    summary = {
        "steps": training.step,
        "loss_first": rows[0]["loss"] if rows else None,
        "loss_last": rows[-1]["loss"] if rows else None,
        "wall_s": earlier_s + since_start_s,
        **since_start(prepared.max_steps, prepared.progress.step, since_start_s),
        "tokens_per_s_train": per_second(rows, "tokens", ["seconds/forward_backward", "seconds/optim_step"]),
        **prepared.data.counts,
        "slots": {role: list(held) for role, held in context.slots().items()},
    }
    record.summary(summary)
    return summary


class _Training:
    """Step after step."""

    def __init__(
        self, prepared: PreparedBatches, trainer: TrainerClient, saver: Saver | None, context: RunContext
    ) -> None:
        self.step = prepared.progress.step
        """Steps that are done."""
        self._next_sample = prepared.progress.prompts.next
        self._prepared, self._trainer, self._saver, self._context = prepared, trainer, saver, context
        self.save, self._watch = SaveOncePerStep(self._write, self.step, context.record), Stopwatch()
        self._skips = SkippedSteps(prepared.trainer.optim.max_skipped_steps, context.record)

    async def run(self) -> None:
        prepared = self._prepared
        self._watch.lap()
        while self.step < prepared.max_steps and not self._context.stop.is_set():
            samples = prepared.batch(self.step)
            with self._watch("forward_backward"):
                await self._trainer.forward_backward(samples, prepared.trainer.model.seq_len)
            await undisturbed(self._update(samples))
            if self._saver and self._saver.is_due(self.step):
                with self._watch("save"):
                    await self.save(self.step)

    async def _write(self, step: int) -> None:
        if self._saver:
            await self._saver.save(self._prepared.progress.after(step, PromptPosition(self._next_sample)))

    async def _update(self, samples: Sequence[Sample]) -> None:
        await self.save.update_begins()
        with self._watch("optim_step"):
            report = await self._trainer.optim_step(
                loss_denominator(samples, loss_aggregation(self._prepared.trainer.loss))
            )
        self.step, self._next_sample = self.step + 1, self._next_sample + len(samples)
        self.save.step_ends(self.step)
        self._skips.note(report)
        self._context.record.metrics(
            self.step, {**_metrics(samples, report, *self._watch.lap()), **self._context.counts()}
        )
        self._skips.check()


def _metrics(
    samples: Sequence[Sample], report: StepReport, step_s: float, seconds: Mapping[str, float]
) -> dict[str, float]:
    num_tokens = float(sum(map(len, samples)))
    train_s = seconds["forward_backward"] + seconds["optim_step"]
    return {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "tokens": num_tokens,
        "trained_tokens": float(report.num_tokens),
        "length_mean": num_tokens / len(samples),
        "tokens_per_s_train": num_tokens / max(train_s, 1e-9),
        **utilisation([report], step_s, train_s),
        "step_s": step_s,
        **{f"seconds/{phase}": spent_s for phase, spent_s in seconds.items()},
        **{f"train/{name}": value for name, value in report.metrics.items()},
    }


def _about(read: Conversations, data: JsonlData, longest: int, first: str, dated: str) -> AboutData:
    counts, why = read.counts, " (the model's max_position_embeddings)" if longest < data.seq_len else ""
    sentences = [
        f"{len(read.samples)} samples from {data.path}; {counts.cut} were cut to {longest} tokens{why}, "
        f"{counts.skipped} had no completion within them and are skipped."
    ]
    if counts.open:
        sentences.append(f"{counts.open} end without a token that ends generation, as the chat template writes them.")
    if counts.unprompted:
        sentences.append(
            f"{counts.unprompted} do not begin their last turn as the chat template's generation prompt does "
            f"({read.unprompted!r}): a policy would go on from another place than it learns here."
        )
    if counts.straddling:
        sentences.append(
            f"{counts.straddling} have a token that is partly of the generation prompt and partly of the completion: a "
            "policy is asked behind whole tokens, and never in the middle of this one."
        )
    if counts.control:
        sentences.append(
            f"{counts.control} have words that spell a special token of the chat template, which begins or ends a turn "
            f"there: {read.control} is the first."
        )
    if dated:
        sentences.append(dated)
    of_rows = {"samples": len(read.samples), "samples_cut": counts.cut, "samples_skipped": counts.skipped}
    return AboutData(" ".join(sentences), of_rows, first)


def _batch_of(samples: Sequence[Sample], order: ExampleOrder, began: Progress, batch_size: int) -> MakeBatch:
    """began: where the run goes on. It has the place of the next sample, as batches may have been of another size."""

    def batch(step: int) -> list[Sample]:
        first = began.prompts.next + (step - began.step) * batch_size
        return [samples[order[first + i][1]] for i in range(batch_size)]

    return batch


def _fake_batch(fake: FakeData, vocab_size: int) -> MakeBatch:
    return lambda step: fake_samples(
        fake.batch_size,
        fake.seq_len,
        vocab_size,
        step=step,
        variable=fake.length == "variable",
        random_ids=fake.input_ids == "random",
    )


def _vocab_size(folder: str) -> int:
    return int(json.loads(read_text(Path(folder) / "config.json"))["vocab_size"])
