"""Making a checkpoint, and going on from one."""

import asyncio
from pathlib import Path

from ductile.loop.progress import TRAINER, Checkpoints, Progress
from ductile.observe import Recorder
from ductile.roles import Trainer


class Saver:
    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, record: Recorder, model_folder: Path | None) -> None:
        """model_folder: where the HF folder goes at every save; None writes none."""
        self._trainer, self._checkpoints, self._record = trainer, checkpoints, record
        self._model_folder = model_folder

    async def save(self, progress: Progress) -> None:
        """All or nothing: until the last file is on disk, the checkpoint before this one is the latest."""
        partial = self._checkpoints.begin(progress.step)
        await self._trainer.save(str(partial / TRAINER))
        # In a thread: to be sure that gigabytes are on disk takes a while, and slots and generators are waiting.
        path = await asyncio.to_thread(self._checkpoints.commit, partial, progress)
        self._record.event("saved", f"Saved step {progress.step} to {path}.", step=progress.step, path=str(path))
        if self._model_folder is not None:
            await self._trainer.export(str(self._model_folder))
            self._record.event("exported", f"The model of step {progress.step} is in {self._model_folder}.")

    async def resume(self, progress: Progress, asked: bool) -> None:
        """Load what `progress` belongs to, and forget what was written after it.

        asked: the user wants to go on. When there is nothing to go on from (step 0), an event says so.
        """
        await asyncio.to_thread(self._checkpoints.sweep, progress.step)
        num_dropped = self._record.rewind(progress.step if progress.step else -1)
        if progress.step:
            await self._trainer.load(str(self._checkpoints.path(progress.step) / TRAINER))
            again = f"; the metrics of {num_dropped} later steps are written anew" if num_dropped else ""
            self._record.event("resumed", f"Resumed after step {progress.step}{again}.", step=progress.step)
        elif asked:
            where = self._checkpoints.folder
            self._record.event("started_anew", f"There is no checkpoint in {where} yet: started from the beginning.")
