"""Saving and loading named tensors in a form that knows no layout: written by N ranks, read by M.

torch's distributed checkpoint: each rank writes its shards, a metadata file says which box of which tensor lies where.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from ductile.parallel.ranks import Ranks


class StateError(Exception):
    """A saved state that cannot be loaded. The text names the path and the cause."""


def save(tensors: Mapping[str, Tensor], path: str | Path, ranks: Ranks) -> None:
    """Write into the directory `path`, and return when it is on disk. Collective.

    Not atomic: write to a new directory and rename it when all ranks have returned.
    """
    writer = FileSystemWriter(path, single_file_per_rank=True, sync_files=True)
    state_dict_saver.save(dict(tensors), storage_writer=writer, process_group=ranks.everyone)


def load(tensors: Mapping[str, Tensor], path: str | Path, ranks: Ranks) -> None:
    """Overwrite the tensors in place with what `path` has under their names. Collective.

    Raises StateError when `path` has no complete state, or one of another model.
    """
    if not (Path(path) / ".metadata").is_file():
        raise StateError(f"{path} has no complete trainer state (.metadata is missing)")
    try:
        state_dict_loader.load(dict(tensors), storage_reader=FileSystemReader(path), process_group=ranks.everyone)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise StateError(f"{path} does not fit this model and optimizer: {cause}") from error
