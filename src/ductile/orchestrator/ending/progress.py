"""How far a run has come, and the folders in which a checkpoint keeps it.

    state/step_20/trainer/        the trainer's state (DCP), for any number of slots
    state/step_20/progress.json   step and data position, and what they mean
    state/step_20/complete.json   every file with its size; written last

A checkpoint is made under another name and renamed when it is whole, so a kill never leaves half of one under its name,
and what it does leave, `partial_step_20`, goes at the next start. A `step_20` of which something is missing was whole
once: a copy, a backup or a disk lost a part of it. It is renamed `damaged_step_20`, and never deleted.

A run that goes on from an earlier step renames the later checkpoints `superseded_step_20`, and deletes them when it has
saved one of its own.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ductile.disk import folder_bytes, named, require_room, sync, sync_tree
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
    reference: str = ""
    """Fingerprint of the reference model of a KL term; empty where there is none."""
    updates: int | None = None
    """Optimizer steps; None in a checkpoint of an earlier version."""
    measured_from: int = 0
    """The first step whose held-out reward can be compared with those since."""
    meaning: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Meaning of these counts (`ductile.orchestrator.ending.meaning`); empty where an earlier version wrote them."""

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Progress":
        prompts = PromptPosition(value["prompts"]["next"], tuple(value["prompts"]["under_way"]))
        return Progress(
            value["step"],
            prompts,
            str(value.get("reference", "")),
            value.get("updates"),
            value.get("measured_from", 0),
            value.get("meaning", {}),
        )

    def updates_done(self, per_step: int = 1) -> int:
        """Return the number of optimizer steps. per_step: as many were in each step, where nothing else is known."""
        return self.step * per_step if self.updates is None else self.updates

    def updates_by(self, step: int, per_step: int = 1) -> int:
        """Return the number of optimizer steps that are done at the end of `step`, which is not before this one."""
        return self.updates_done(per_step) + max(0, step - self.step) * per_step

    def after(self, step: int, prompts: PromptPosition, per_step: int = 1) -> "Progress":
        """Return the progress of a run that has gone on from here to `step`, with `per_step` optimizer steps in each
        step."""
        return replace(self, step=step, prompts=prompts, updates=self.updates_by(step, per_step))


class Checkpoints:
    """The checkpoints of one run. `begin` gives a folder to write into, `commit` makes it a checkpoint."""

    def __init__(self, folder: Path, keep_last: int | None = 2) -> None:
        self.folder, self._keep_last = folder, keep_last

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first. Raises OSError when the folder cannot be read."""
        return [step for step, wrong in self._all() if not wrong]

    def damaged(self) -> dict[int, str]:
        """Steps of the other checkpoints, with what is wrong with each. Raises OSError."""
        return {step: wrong for step, wrong in self._all() if wrong}

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def begin(self, step: int) -> Path:
        """Raises DiskError when there is less room than the latest checkpoint takes, or none for a folder."""
        partial = self.folder / f"partial_step_{step}"
        self.discard(partial)
        steps = self.steps()
        if steps:
            require_room(self.folder, folder_bytes(self.path(steps[-1])), f"the checkpoint of step {step}")
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise named(error, partial) from error
        return partial

    def discard(self, partial: Path) -> None:
        """Delete what is no checkpoint, or none any more: it must not keep a full disk full."""
        shutil.rmtree(partial, ignore_errors=True)

    def commit(self, partial: Path, progress: Progress) -> Path:
        """Raises FileExistsError when the step is saved already, DiskError when the disk does not take it."""
        path = self.path(progress.step)
        if path.exists():
            raise FileExistsError(f"{path} exists")
        try:
            write_json(partial / PROGRESS, asdict(progress))
            paths = sorted(path for path in partial.rglob("*") if path.is_file())
            files = {str(path.relative_to(partial)): path.stat().st_size for path in paths}
            write_json(partial / COMPLETE, {"step": progress.step, "files": files})
            sync_tree(partial)
            partial.rename(path)
            sync(self.folder)
        except OSError as error:
            raise named(error, path) from error
        self._forget_old()
        return path

    def load(self, step: int) -> Progress:
        """Raises CheckpointError."""
        file = self.path(step) / PROGRESS
        try:
            return Progress.from_json(json.loads(file.read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def find(self, resume_step: int) -> int | None:
        """The step to go on from; -1 asks for the latest. None: there never was one.

        Raises CheckpointError when a certain step is asked for and not there, or when none is whole; OSError when the
        folder cannot be read.
        """
        steps, damaged = self.steps(), self.damaged()
        if resume_step in steps or (resume_step == -1 and steps):
            return steps[-1] if resume_step == -1 else resume_step
        broken = "; ".join(f"step_{step} is not whole: {wrong}" for step, wrong in damaged.items())
        if resume_step == -1:
            if not damaged:
                return None
            raise CheckpointError(
                f"{self.folder} has no complete checkpoint; {broken}. Nothing was changed: bring back what is missing, "
                "or give another --output-dir to start from the beginning"
            )
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
        what = f"{self.folder} has no complete checkpoint of step {resume_step}; {there}"
        raise CheckpointError(f"{what}; {broken}" if broken else what)

    def tidy(self, last_step: int) -> list[str]:
        """Remove what was left half done and rename later checkpoints, before a run goes on after `last_step`.

        Returns a sentence for each checkpoint that is called otherwise now.
        """
        for partial in self.folder.glob("partial_step_*"):
            self.discard(partial)
        said: list[str] = []
        for step, wrong in self.damaged().items():
            aside = self._rename(step, "damaged")
            said.append(f"The checkpoint of step {step} is not whole ({wrong}): it is {aside} now.")
        for step in self.steps():
            if step > last_step:
                aside = self._rename(step, "superseded")
                said.append(f"The checkpoint of step {step} is {aside} until the next one is saved.")
        return said

    def _all(self) -> list[tuple[int, str]]:
        """Each step with a checkpoint, in order, and what is wrong with it; "" for a complete one."""
        try:
            # Not `glob`, which takes a folder that may not be read for an empty one.
            names = [path.name.removeprefix("step_") for path in self.folder.iterdir() if path.name.startswith("step_")]
        except FileNotFoundError:
            return []
        steps = sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))
        return [(step, self._wrong(step)) for step in steps]

    def _wrong(self, step: int) -> str:
        """What is wrong with a checkpoint; "" when it is complete. A file is missing only when it is surely not there:
        a disk that does not respond raises its OSError."""
        folder = self.path(step)
        try:
            files = json.loads((folder / COMPLETE).read_bytes())["files"].items()
        except (FileNotFoundError, NotADirectoryError):
            return f"{COMPLETE} is missing"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return f"{COMPLETE} cannot be read"
        for name, size in files:
            try:
                there = (folder / name).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return f"{name} is missing"
            if there != size:
                return f"{name} has {there} bytes of {size}"
        return ""

    def _rename(self, step: int, word: str) -> Path:
        """Rename a checkpoint to a name that is free, and return its new path."""
        aside, number = self.folder / f"{word}_step_{step}", 1
        while aside.exists():
            number += 1
            aside = self.folder / f"{word}_step_{step}.{number}"
        return self.path(step).rename(aside)

    def _forget_old(self) -> None:
        for step in self.steps()[: -self._keep_last] if self._keep_last else []:
            # Renamed first: a kill in the middle must not leave half a checkpoint under a good name.
            self.discard(self.path(step).rename(self.folder / f"partial_step_{step}"))
        for superseded in self.folder.glob("superseded_step_*"):
            self.discard(superseded)
