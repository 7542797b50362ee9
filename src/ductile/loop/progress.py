"""How far a run has come, and the folders in which a checkpoint keeps it.

    state/step_20/trainer/        the trainer's state (DCP), for any number of slots
    state/step_20/progress.json   step and data position
    state/step_20/complete.json   every file with its size; written last

A checkpoint is made under another name and renamed when it is whole, so `step_20` is complete or not there. What a kill
leaves half done is swept away at the next start.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ductile.observe import write_json
from ductile.tasks.prompts import PromptPosition

COMPLETE = "complete.json"
PROGRESS = "progress.json"
TRAINER = "trainer"


class CheckpointError(Exception):
    """There is no checkpoint to go on from. The text says what there is."""


@dataclass(frozen=True, slots=True)
class Progress:
    step: int = 0
    """Batches trained on; also the version of the weights."""
    prompts: PromptPosition = field(default_factory=PromptPosition)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Progress":
        prompts = PromptPosition(value["prompts"]["next"], tuple(value["prompts"]["under_way"]))
        return Progress(value["step"], prompts)


class Checkpoints:
    """The checkpoints of one run. `begin` gives a folder to write into, `commit` makes it a checkpoint."""

    def __init__(self, folder: Path, keep_last: int | None = 2) -> None:
        self.folder, self._keep_last = folder, keep_last

    def steps(self) -> list[int]:
        """Of the complete checkpoints, oldest first."""
        names = (path.name.removeprefix("step_") for path in self.folder.glob("step_*"))
        return sorted(int(name) for name in names if name.isdecimal() and self._is_complete(int(name)))

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def begin(self, step: int) -> Path:
        partial = self.folder / f"partial_step_{step}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, partial: Path, progress: Progress) -> Path:
        """Raises FileExistsError when the step is saved already."""
        if self.path(progress.step).exists():
            raise FileExistsError(f"{self.path(progress.step)} exists")
        write_json(partial / PROGRESS, asdict(progress))
        files = {str(file.relative_to(partial)): file.stat().st_size for file in _files(partial)}
        write_json(partial / COMPLETE, {"step": progress.step, "files": files})
        _sync(partial)
        partial.rename(self.path(progress.step))
        _sync(self.folder)
        self._forget_old()
        return self.path(progress.step)

    def load(self, step: int) -> Progress:
        """Raises CheckpointError."""
        file = self.path(step) / PROGRESS
        try:
            return Progress.from_json(json.loads(file.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def find(self, resume_step: int) -> int | None:
        """The step to go on from; -1 asks for the latest, which may not exist yet (None).

        Raises CheckpointError when a certain step is asked for and not there.
        """
        steps = self.steps()
        if resume_step == -1:
            return steps[-1] if steps else None
        if resume_step not in steps:
            there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
            raise CheckpointError(f"{self.folder} has no complete checkpoint of step {resume_step}; {there}")
        return resume_step

    def sweep(self, last_step: int) -> None:
        """Remove what was left half done, and checkpoints of steps after `last_step`, which are to be done again."""
        for path in self.folder.glob("partial_step_*"):
            shutil.rmtree(path)
        for path in self.folder.glob("step_*"):
            number = path.name.removeprefix("step_")
            if number.isdecimal() and (int(number) > last_step or not self._is_complete(int(number))):
                shutil.rmtree(path)

    def _is_complete(self, step: int) -> bool:
        try:
            files = json.loads((self.path(step) / COMPLETE).read_text())["files"]
            return all((self.path(step) / name).stat().st_size == size for name, size in files.items())
        except (OSError, ValueError, KeyError):
            return False

    def _forget_old(self) -> None:
        for step in self.steps()[: -self._keep_last] if self._keep_last else []:
            # Renamed first: a kill in the middle must not leave half a checkpoint under a good name.
            doomed = self.path(step).rename(self.folder / f"partial_step_{step}")
            shutil.rmtree(doomed)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync(folder: Path) -> None:
    """The files' content and the folder's entries, to disk."""
    for path in [*_files(folder), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
