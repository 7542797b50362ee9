"""Making a checkpoint, and going on from one."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ductile.config.reading.command_line import as_sentence
from ductile.config.schema.trainer import CheckpointConfig
from ductile.disk import folder_bytes, require_room
from ductile.events.checkpoints import (
    CheckpointRenamed,
    CheckpointSaved,
    ModelExported,
    ResumedOtherwise,
    RunResumed,
    StartedAnew,
)
from ductile.observe import Recorder, read_jsonl
from ductile.orchestrator.ending.meaning import MeaningChange
from ductile.orchestrator.ending.progress import TRAINER, CheckpointError, Checkpoints, Progress
from ductile.roles import Failure, TrainerClient

AUTO_S = 600.0
"""Seconds at least between two saves with `ckpt.interval = "auto"`."""
MAX_SHARE = 0.05
"""Largest share of the time that saving takes with `ckpt.interval = "auto"`: where it takes long, it comes seldom."""


class ExportFailed(Failure):
    """A step is saved, and its model folder cannot be written. The text says so, and how to have the model."""

    code = "export_failed"


class Saver:
    def __init__(
        self,
        trainer: TrainerClient,
        checkpoints: Checkpoints,
        record: Recorder,
        model_folder: Path | None,
        config: CheckpointConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """model_folder: where the HF folder goes at every save; None writes none."""
        self._trainer, self._checkpoints, self._record = trainer, checkpoints, record
        self._model_folder, self._config, self._clock = model_folder, config or CheckpointConfig(), clock
        self._since_s, self._took_s = clock(), 0.0

    def is_due(self, step: int) -> bool:
        """Return whether `ckpt.interval` wants `step`, which has just been trained, to be saved."""
        interval = self._config.interval
        if interval == "auto":
            return is_time(self._clock() - self._since_s, self._took_s)
        return interval is not None and step % interval == 0

    async def save(self, progress: Progress) -> None:
        """All or nothing: until the last file is on disk, the checkpoint before this one is the latest.

        Raises what the trainer raises, or DiskError; then nothing is left of it. Raises ExportFailed when only the
        model is missing. A step that is saved already is only exported.
        """
        began_s = self._clock()
        if progress.step not in self._checkpoints.steps():
            path = await self._write(progress)
            sentence = f"Saved step {progress.step} to {path}."
            self._record.event(CheckpointSaved(progress.step, str(path), sentence=sentence))
        await self._export(progress.step)
        self._since_s = self._clock()
        self._took_s = self._since_s - began_s

    async def _write(self, progress: Progress) -> Path:
        partial = self._checkpoints.begin(progress.step)
        try:
            await self._trainer.save(str(partial / TRAINER))
            # In a thread: to be sure that gigabytes are on disk takes a while, and slots and generators are waiting.
            return await asyncio.to_thread(self._checkpoints.commit, partial, progress)
        except Exception:  # when it is cancelled, a slot may still be writing: the next start sweeps it
            await asyncio.to_thread(self._checkpoints.discard, partial)
            raise

    async def _export(self, step: int) -> None:
        """Write the model folder of `step`, if one is wanted. Raises ExportFailed."""
        folder = self._model_folder
        if folder is None:
            return
        try:
            require_room(folder.parent, folder_bytes(folder), f"the model in {folder}")
            await self._trainer.export(str(folder), self._config.export_dtype)
        except (Failure, OSError) as error:  # anything else is a mistake of ours, with its traceback
            raise ExportFailed(
                f"The model of step {step} cannot be written: {as_sentence(str(error))} The checkpoint of step {step} "
                "has all that was trained, and --resume writes the model from it"
            ) from error
        self._record.event(ModelExported(step, sentence=f"The model of step {step} is in {folder}."))

    async def resume(self, progress: Progress, asked: bool, changes: Sequence[MeaningChange] = ()) -> None:
        """Load what `progress` belongs to, set aside what was written after it, and write the model that is missing.

        asked: the user wants to go on. When there is nothing to go on from (step 0), an event says so. changes:
        what the user is told of.
        """
        if progress.step:  # first of all: what cannot be loaded must not cost what could be
            await self._trainer.load(str(self._checkpoints.path(progress.step) / TRAINER))
        for sentence in await asyncio.to_thread(self._checkpoints.tidy, progress.step):
            self._record.event(CheckpointRenamed(sentence=sentence))
        num_dropped = self._record.rewind(progress.step if progress.step else -1)
        if progress.step:
            later = f"{num_dropped} later step{'' if num_dropped == 1 else 's'}"
            again = f"; the metrics of {later} are written anew" if num_dropped else ""
            sentence = f"Resumed after step {progress.step}{again}."
            self._record.event(RunResumed(progress.step, sentence=sentence))
            for each in changes:
                self._record.event(ResumedOtherwise(each.key, each.before, each.now, sentence=each.sentence))
            if self._model_folder and await asyncio.to_thread(lacks_model, self._model_folder, progress.step):
                await self._export(progress.step)
        elif asked:
            again = ", and the metrics of its steps are written anew" if num_dropped else ""
            sentence = f"There is no checkpoint in {self._checkpoints.folder} yet: started from the beginning{again}."
            self._record.event(StartedAnew(sentence=sentence))
        self._since_s = self._clock()


def lacks_model(folder: Path, step: int) -> bool:
    """Return whether there is no model in `folder`, a run's `model/`, or one of another step than `step`.

    The run's events tell of which step it is. Where they do not, as older ones do not, it counts as the right one.
    """
    exported = [row for row in read_jsonl(folder.parent / "events.jsonl") if row.get("kind") == "exported"]
    return not folder.exists() or (bool(exported) and exported[-1].get("step", step) != step)


def is_time(since_s: float, took_s: float) -> bool:
    """Return whether to save by `ckpt.interval = "auto"`, so long after the last save, which took `took_s`."""
    return since_s >= max(AUTO_S, took_s / MAX_SHARE)


def where_to_begin(checkpoints: Checkpoints, resume_step: int | None, model_folder: Path) -> Progress:
    """Progress of the checkpoint that `ckpt.resume_step` asks for; step 0 when it asks for none, or none ever was.

    Raises CheckpointError or OSError: also when there is only the model of a run whose checkpoints are gone, since the
    first save of another beginning would replace it.
    """
    step = None if resume_step is None else checkpoints.find(resume_step)
    if step is not None:
        return checkpoints.load(step)
    if resume_step is not None and model_folder.exists():
        raise CheckpointError(
            f"{checkpoints.folder} has no checkpoint to go on from, but {model_folder} has a model, which a start from "
            "the beginning would replace. Bring the checkpoints back, or give another --output-dir"
        )
    return Progress()
