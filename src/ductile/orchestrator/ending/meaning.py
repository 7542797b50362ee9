"""Meaning of a checkpoint's counts, written with them and compared when the run goes on.

    {"examples": 32, "prompts": "9f86d081884c7d65", "orchestrator.seed": 0, "trainer.optim.lr": 0.0001, ...}

The names of `FACTS` are facts that no key of the config says, and so are the fields of the model's `config.json`
("config.json rms_norm_eps") and `num_updates`, the optimizer steps by the run's end; all others are keys. What a run's
own meaning consists of is in `ductile.orchestrator.commands.run_meaning`. A change with which the checkpoint's place in
the data or its optimizer state would mean something else is refused; of any other the user is told. What one side lacks
is not compared: another version of ductile wrote it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ductile.config.reading.errors import show
from ductile.config.schema.trainer import SchedulerConfig
from ductile.orchestrator.ending.progress import CheckpointError, Progress
from ductile.trainer.lr_schedule import learning_rate

Meaning = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a meaning has and no key of a config says."""

    words: str
    """Name in words, with the keys that it comes from."""
    why: str = ""
    """Why another value is refused, or what comes of it."""
    is_refused: bool = False


FACTS = {
    "examples": Fact("the number of examples to train on (orchestrator.task, orchestrator.eval)", "", True),
    "prompts": Fact(
        "the fingerprint of the prompts to train on (orchestrator.task)",
        "they are others, or in another order, so some would be asked twice and some never",
        True,
    ),
    "rows": Fact("the fingerprint of the rows that rewards read (orchestrator.task)"),
    "held_out": Fact(
        "the fingerprint of the held-out examples (orchestrator.eval)",
        "held-out rewards before and after are of two sets, and the summary compares none of them",
    ),
    "samples": Fact("the number of samples (data.path, data.seq_len)", "", True),
    "conversations": Fact(
        "the fingerprint of the conversations (data.path)",
        "they are others, or in another order, so some would be trained on twice and some never",
        True,
    ),
    "tokenizer": Fact(
        "the fingerprint of the tokenizer (model.name)", "the ids that were trained would be other text", True
    ),
    "chat_template": Fact("the fingerprint of the chat template (model.name, model.chat_template)"),
    "dates": Fact("the date that the chat template writes (model.chat_template)", "the prompts of the two days differ"),
    "special_tokens": Fact("the table of special tokens that the chat template reads (model.name)"),
    "eos_token_ids": Fact("the tokens that end a turn (model.name)"),
    "weights": Fact(
        "the fingerprint of the base model's weights (model.name)",
        "those of the checkpoint are trained on, and the base model's are not read",
    ),
}
REFUSED = {
    "orchestrator.seed": "examples are in another order, so some would be asked twice and some never",
    "orchestrator.shuffle": "examples are in another order, so some would be asked twice and some never",
    "seed": "samples are in another order, so some would be trained on twice and some never",
    "data.shuffle": "samples are in another order, so some would be trained on twice and some never",
    "data.type": "the checkpoint counts samples of other data",
    "trainer.optim.type": "the checkpoint has the state of another optimizer",
    "optim.type": "the checkpoint has the state of another optimizer",
    "trainer.optim.moments": "the checkpoint has moments of the other kind",
    "optim.moments": "the checkpoint has moments of the other kind",
}
"""Keys of a config of which another value is refused, and why."""
DTYPES = ("trainer.model.optimization_dtype", "model.optimization_dtype")
MEASURED_BY = (
    "held_out", "tokenizer", "chat_template", "dates", "special_tokens", "eos_token_ids", "orchestrator.eval.",
    "orchestrator.task.reward", "orchestrator.task.import_path", "inference.model.chat_template_kwargs",
    "inference.model.max_model_len",
)  # fmt: skip
"""How the names begin of what held-out rewards depend on besides the weights."""

IMPLIES = {"examples": ("prompts", "rows"), "prompts": ("rows",), "samples": ("conversations",)}
"""Facts that are other, too, where one is: the user is told of the cause alone."""
SETS_LR = ("optim.lr", "max_steps", "n_minibatches")
"""How the names end of what a learning rate depends on besides its schedule."""


@dataclass(frozen=True, slots=True)
class MeaningChange:
    """Something that is other than when the checkpoint was written."""

    key: str
    """Its name in a meaning; "" where the checkpoint does not have one."""
    before: Any
    now: Any
    sentence: str
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Beginning:
    """The beginning of a run, or the checkpoint that it goes on from."""

    progress: Progress
    """Step 0 for a new run. What it means, and is saved with, is today's."""
    changes: tuple[MeaningChange, ...] = ()
    """Changes since the checkpoint was written."""
    owes_evaluation: bool = False
    """True where the run was cut before the evaluation after its last step."""

    @property
    def last_kept(self) -> int | None:
        """The last step whose metrics stay as they are written; None where no step is done. The row of a step that owes
        its evaluation is written anew."""
        return self.progress.step - self.owes_evaluation if self.progress.step else None

    def measured(self, owes_evaluation: bool) -> "Beginning":
        """Return the beginning of a run that has held-out rewards: those from before are compared with later ones only
        where nothing has changed that they depend on."""
        progress = self.progress
        if not measures_alike(self.changes):
            progress = replace(progress, measured_from=progress.step + (not owes_evaluation))
        return replace(self, progress=progress, owes_evaluation=owes_evaluation)


NEW = Beginning(Progress())
"""The beginning of a run that goes on from nothing."""


def changes(progress: Progress, now: Meaning, updates: int) -> tuple[MeaningChange, ...]:
    """Return all that is other for a run that goes on from `progress` with the meaning `now`, those first that are
    refused. updates: optimizer steps that are done."""
    before, step = progress.meaning, progress.step
    if not before:
        lacks = "does not say with which examples, seeds, dtypes, learning rate and template it was trained"
        sentence = f"The checkpoint of step {step} is of an earlier version and {lacks}: whether these are the same now"
        return (MeaningChange("", None, None, f"{sentence} is not known."),)
    keys = [key for key in before if key in now and before[key] != now[key]]
    implied = {"num_updates", *(name for key in keys for name in IMPLIES.get(key, ()))}  # those follow from max_steps
    keys = [key for key in keys if key not in implied]
    found = [_change(key, before[key], now[key], step) for key in keys]
    was, is_now = (next_learning_rate(meaning, updates) for meaning in (before, now))
    if was is not None and is_now is not None and was != is_now:
        sets_lr = [key for key in {**before, **now} if key.endswith(SETS_LR) or "scheduler." in key]
        by = ", ".join(key for key in sets_lr if key not in before or key not in now or before[key] != now[key])
        what = f"The learning rate of the next optimizer step was to be {was:.6g} and is {is_now:.6g}"
        found.append(MeaningChange("lr", was, is_now, f"{what} ({by})."))
    return tuple(sorted(found, key=lambda each: not each.is_refused))


def _change(key: str, before: Any, now: Any, step: int) -> MeaningChange:
    fact = FACTS.get(key, Fact(key, REFUSED.get(key, ""), key in REFUSED))
    refused, why = fact.is_refused, fact.why
    if key in DTYPES and now == "bfloat16":
        refused, why = True, "parameters and moments would lose bits that were trained"
    was, is_now = _shown(before, now)
    said = f"{fact.words} was {was} up to step {step} and is {is_now} now" + (f": {why}" if why else "")
    instead = f" Write {key} = {show(before)}." if refused and key not in FACTS else ""
    return MeaningChange(
        key, before, now, f"{said[0].upper() if key in FACTS else said[0]}{said[1:]}.{instead}", refused
    )


def _shown(before: Any, now: Any) -> tuple[str, str]:
    """Both values in words; of long lists, what only one of them has."""
    if isinstance(before, list) and isinstance(now, list) and show(before) == show(now):
        before, now = [each for each in before if each not in now], [each for each in now if each not in before]
    return show(before), show(now)


def going_on(progress: Progress, meaning: Meaning, max_steps: int, per_step: int, folder: Path) -> Beginning:
    """Return the progress with today's `meaning`, and what is other than at its checkpoint; nothing for a new run.

    per_step: optimizer steps in a step. folder: the run's. Raises CheckpointError with every change when one is
    refused.
    """
    updates, num_updates = progress.updates_done(per_step), progress.updates_by(max_steps, per_step)
    now = json.loads(json.dumps({**meaning, "max_steps": max_steps, "num_updates": num_updates}, default=str))
    found = changes(progress, now, updates) if progress.step else ()
    if any(each.is_refused for each in found):
        raise CheckpointError(
            f"{folder / 'state'}: step {progress.step} cannot be gone on from with this config and data. "
            f"{' '.join(each.sentence for each in found)} Bring back what it was trained with, or begin a run of its "
            f"own from the trained model: --model.name {folder / 'model'}, another --output-dir and no --resume"
        )
    return Beginning(replace(progress, meaning=now, updates=updates), found)


def measures_alike(found: Sequence[MeaningChange]) -> bool:
    """Return whether held-out rewards from before can be compared with those from now on."""
    return not any(each.key.startswith(MEASURED_BY) for each in found)


def next_learning_rate(meaning: Meaning, updates: int) -> float | None:
    """Return the learning rate of the optimizer step after `updates` ones; None where the meaning does not say it."""
    root = "trainer." if any(key.startswith("trainer.") for key in meaning) else ""
    table = {key.removeprefix(f"{root}scheduler."): meaning[key] for key in meaning if f"{root}scheduler." in key}
    try:
        schedule = TypeAdapter[SchedulerConfig](SchedulerConfig).validate_python(table)
        return learning_rate(schedule, meaning[f"{root}optim.lr"], updates, meaning["num_updates"])
    except (ValidationError, ValueError, KeyError):
        return None
