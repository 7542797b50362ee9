"""Saving and loading named tensors in a form that knows no layout: written by N ranks, read by M.

torch's distributed checkpoint: each rank writes its shards, a metadata file says which box of which tensor lies where.
That file is a pickle; `ductile.parallel.metadata` reads it, and nothing in it is called.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ductile.disk import named
from ductile.parallel.metadata import SafeReader
from ductile.parallel.parallel_context import ParallelContext


class StateError(Exception):
    """A state that cannot be saved or loaded. The text names the path and the cause."""


def save(tensors: Mapping[str, Tensor], path: str | Path, context: ParallelContext) -> None:
    """Write into the directory `path`, and return when it is on disk. Collective.

    Not atomic: write to a new directory and rename it when all ranks have returned. Raises StateError on every rank
    when one of them cannot write; they are still in step then, and the tensors are as they were.
    """
    writer = _NamingWriter(path, single_file_per_rank=True, sync_files=True)
    try:
        state_dict_saver.save(dict(tensors), storage_writer=writer, process_group=context.everyone)
    except CheckpointException as error:  # a BaseException: no `except Exception` would see it
        raise StateError(str(_first(error))) from error


def load(tensors: Mapping[str, Tensor], path: str | Path, context: ParallelContext) -> None:
    """Overwrite the tensors in place with what `path` has under their names. Collective.

    Raises StateError when `path` has no complete state, or one of another model.
    """
    if not (Path(path) / ".metadata").is_file():
        raise StateError(f"{path} has no complete trainer state (.metadata is missing)")
    try:
        state_dict_loader.load(dict(tensors), storage_reader=SafeReader(path), process_group=context.everyone)
    except CheckpointException as error:
        raise StateError(f"{path} does not fit this model and optimizer: {_first(error)}") from error


class _NamingWriter(FileSystemWriter):
    """Names the disk that failed, and why: torch's own error is its zip writer's, which misses what was not written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise named(error, Path(self.path)) from None  # travels to all ranks: what it came from need not

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            super().finish(metadata, results)
        except OSError as error:
            raise named(error, Path(self.path)) from None


def _first(error: CheckpointException) -> BaseException:
    """The error of the first rank that failed."""
    return next(iter(error.failures.values()))[0]
