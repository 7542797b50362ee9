"""TensorBoard and W&B as listeners of a run. Both are optional packages, imported only when asked for."""

import importlib
import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ductile.observe import Listener


class SinkMissing(Exception):
    """A package that the config needs is not installed. The text says how to get it."""


class TensorboardSink(Listener):
    """Writes event files with tensorboard's own writer; torch is not needed."""

    def __init__(self, folder: Path) -> None:
        writer = _import("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = _import("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = _import("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._writer = writer.EventFileWriter(str(folder))

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink(Listener):
    """One W&B run. `offline` writes to `folder` only; `wandb sync` sends it later."""

    def __init__(self, folder: Path, project: str, name: str | None, offline: bool, config: Mapping[str, Any]) -> None:
        wandb = _import("wandb", "wandb")
        self._run = wandb.init(
            project=project,
            name=name,
            dir=str(folder),
            mode="offline" if offline else "online",
            config=dict(config),
        )

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


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
