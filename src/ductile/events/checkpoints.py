"""Events of what is written to go on from, and of going on from it."""

from typing import Any

from ductile.observe import RunEvent


class OldRunReplaced(RunEvent, tag="replaces", frozen=True):
    """`clean` is set and the folder has a run: it is deleted when the new one has done its first step or evaluation."""


class RunResumed(RunEvent, tag="resumed", frozen=True):
    """The run goes on from a checkpoint."""

    step: int
    """Step of the checkpoint."""


class ResumedOtherwise(RunEvent, tag="resumed_otherwise", frozen=True):
    """Something is other than it was up to the checkpoint that the run goes on from, or may be."""

    key: str = ""
    """A key of the config, or a fact that `ductile.orchestrator.ending.meaning` names; "" where nothing is known."""
    before: Any = None
    now: Any = None


class SinkNotTakenBack(RunEvent, tag="sink_not_taken_back", frozen=True):
    """The run goes on from an earlier step, and a tool that is told of its metrics keeps those of later steps."""


class StartedAnew(RunEvent, tag="started_anew", frozen=True):
    """A run that is asked to go on finds no checkpoint and starts from the beginning."""


class CheckpointRenamed(RunEvent, tag="checkpoint_renamed", frozen=True):
    """A checkpoint that is damaged, or later than the step that the run goes on from, has another name."""


class CheckpointSaved(RunEvent, tag="saved", frozen=True):
    """A checkpoint is complete."""

    step: int
    path: str


class ModelExported(RunEvent, tag="exported", frozen=True):
    """The model's Hugging Face folder is written."""

    step: int | None = None
    """Training step of the model; None in runs of format 1, which did not say it."""


class CheckpointNotSaved(RunEvent, tag="not_saved", frozen=True):
    """What was trained since the last checkpoint cannot be saved."""


class ModelNotExported(RunEvent, tag="not_exported", frozen=True):
    """A checkpoint is complete, and the model's Hugging Face folder cannot be written."""
