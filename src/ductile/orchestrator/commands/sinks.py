"""TensorBoard and W&B as listeners of a run. Both are optional packages, imported only when asked for."""

import importlib
import importlib.util
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ductile.config.schema.run import WandbConfig
from ductile.error_text import error_text
from ductile.events.checkpoints import RunResumed, SinkNotTakenBack, StartedAnew
from ductile.events.resizes import TrainerWentBack
from ductile.observe import Listener, Recorder, RunEvent, write_json

KILLED = 255
"""Exit code with which W&B itself finishes a run that the user interrupts. Others, but 0, are failures to it."""
RUN_ID = "ductile.json"
"""File in a run's `wandb` folder that keeps the id of its W&B run."""


class SinkMissing(Exception):
    """A package that the config needs is not installed, or does not begin. The text says what to do."""


class TensorboardSink(Listener):
    """Writes event files with tensorboard's own writer; torch is not needed."""

    def __init__(self, folder: Path, last_kept: int | None = None) -> None:
        """last_kept: as `Beginning` has it."""
        self._first = 0 if last_kept is None else last_kept + 1
        writer = _import("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = _import("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._log = _import("tensorboard.compat.proto.event_pb2", "tensorboard").SessionLog
        self._summary = _import("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._writer = writer.EventFileWriter(str(folder))

    def on_event(self, event: RunEvent) -> None:
        """TensorBoard forgets what it was told of steps that are taken back."""
        if isinstance(event, TrainerWentBack):
            self._first = 0 if event.last_kept is None else event.last_kept + 1
        if isinstance(event, RunResumed | StartedAnew):
            start = self._log(status=self._log.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=self._first, session_log=start))

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self, code: int) -> None:
        self._writer.close()


class WandbSink(Listener):
    """One W&B run, however often the run is resumed."""

    def __init__(
        self,
        record: Recorder,
        wanted: WandbConfig,
        config: Mapping[str, Any],
        last_kept: int | None = None,
    ) -> None:
        """last_kept: as `Beginning` has it; None begins a run of W&B's.

        Not `offline`: as WANDB_MODE says. Raises SinkMissing.
        """
        self._record, self._last_kept, self._wandb = record, last_kept, _import("wandb", "wandb")
        project = wanted.project or os.environ.get("WANDB_PROJECT") or "ductile"
        self._asked: dict[str, Any] = {"project": project, "dir": str(record.folder), "config": dict(config)}
        if wanted.name is not None:  # else the environment says it
            self._asked["name"] = wanted.name
        if wanted.offline is not None:
            self._asked["mode"] = "offline" if wanted.offline else "online"
        file = record.folder / "wandb" / RUN_ID
        self._known = _read_id(file, project) if last_kept is not None else None
        self._file = file
        self._run = self._begin() if self._known is None else self._go_on()

    def on_event(self, event: RunEvent) -> None:
        """W&B forgets what it was told of steps that are taken back, and not before they are."""
        if isinstance(event, TrainerWentBack):
            self._last_kept, self._known = event.last_kept, str(self._run.id)
            if event.last_kept is None:  # there is no step to go back to
                self._run.finish(exit_code=1)
                self._run, self._known = self._begin(), None
        if not isinstance(event, RunResumed) or self._known is None:
            return
        self._run.finish(exit_code=0)  # it goes back only where it begins
        try:
            back_to = f"{self._known}?_step={self._last_kept}"
            self._run = self._wandb.init(**self._asked, id=self._known, resume_from=back_to)
        except Exception as error:  # an older package, or a server that cannot do it
            what = f"W&B cannot take its run {self._known} back to step {self._last_kept}"
            said = f"{what}, and keeps what it was told of later steps: {error_text(error)}."
            self._record.event(SinkNotTakenBack(sentence=said))
            self._run = self._go_on()

    def _begin(self) -> Any:
        run = _init(self._wandb, self._asked)
        self._file.parent.mkdir(exist_ok=True)
        write_json(self._file, {"id": str(run.id), "project": self._asked["project"]})
        return run

    def _go_on(self) -> Any:
        return _init(self._wandb, {**self._asked, "id": self._known, "resume": "allow"})

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, code: int) -> None:
        self._run.finish(exit_code=KILLED if code > 128 else code)  # which is how a signal's code begins


def _init(wandb: Any, asked: Mapping[str, Any]) -> Any:
    """A run of W&B's. Raises SinkMissing: nobody is logged in, say, or its server is not reached."""
    try:
        return wandb.init(**asked)
    except Exception as error:
        what = f"[wandb] is set, but W&B begins no run: {error_text(error).rstrip('.')}"
        raise SinkMissing(f"{what}. Write --wandb.offline to send it later, or --no-wandb") from error


def _read_id(file: Path, project: str) -> str | None:
    """The id of the W&B run that was logged to `project`; None when there is none."""
    try:
        known = json.loads(file.read_bytes())
        return str(known["id"]) if known["project"] == project else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def need(package: str) -> None:
    """Raises SinkMissing when the package is not installed. Imports nothing."""
    if importlib.util.find_spec(package) is None:
        raise _missing(package, "there is no such package here")


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(package, str(error)) from error


def _missing(package: str, why: str) -> SinkMissing:
    return SinkMissing(
        f"[{package}] is set, but the package {package} is not installed ({why}): "
        f"pip install {package}, or leave the table out"
    )
