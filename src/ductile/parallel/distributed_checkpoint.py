"""Saving and loading named tensors in a form that knows no layout: written by N ranks, read by M.

torch's distributed checkpoint: each rank writes its shards, a metadata file says which box of which tensor lies where.
That file is a pickle; `ductile.parallel.metadata` reads it, and nothing in it is called.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ductile.core.layout.geometry.holdings import Box
from ductile.disk import named
from ductile.parallel.metadata import SafeReader
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.parts import SlotParts


class StateError(Exception):
    """A state that cannot be saved or loaded. The text names the path and the cause."""


class HeldTensor:
    """A slot's part of a tensor, as torch's distributed checkpoint asks for it: a slot writes the boxes that it owns,
    and reads those that it holds."""

    def __init__(self, local: Tensor, parts: SlotParts, parameter: str) -> None:
        """`local` is the slot's part, flat; it lies as that of `parameter` does."""
        self._local, self._parts, self._parameter = local, parts, parameter

    def size(self) -> torch.Size:
        return torch.Size(self._parts.shape(self._parameter))

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box[0])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, self.size()),
            )
            for box in self.owned
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.held]

    def box_at(self, index: MetadataIndex, boxes: Sequence[Box]) -> Tensor:
        """The one of the boxes that begins where the index says, in the slot's own memory."""
        box = next(box for box in boxes if box[0] == tuple(index.offset or ()))
        return self._parts.view(self._parameter, self._local, box)

    def check_dtype(self, name: str, stored: torch.dtype) -> None:
        """Raises ValueError where one side has codes and the other numbers. Numbers are converted."""
        if stored.is_floating_point != self._local.dtype.is_floating_point:
            raise ValueError(f"{name} is {stored} there, and this trainer keeps it in {self._local.dtype}")

    @property
    def owned(self) -> list[Box]:
        return self._parts.owned(self._parameter)

    @property
    def held(self) -> list[Box]:
        return self._parts.held(self._parameter)


def _chunk(box: Box) -> ChunkStorageMetadata:
    start, stop = box
    return ChunkStorageMetadata(torch.Size(start), torch.Size(b - a for a, b in zip(start, stop, strict=True)))


def save(tensors: Mapping[str, Tensor | HeldTensor], path: str | Path, context: ParallelContext) -> None:
    """Write into the directory `path`, and return when it is on disk. Collective.

    Not atomic: write to a new directory and rename it when all ranks have returned. Raises StateError on every rank
    when one of them cannot write; they are still in step then, and the tensors are as they were.
    """
    writer = _NamingWriter(path, single_file_per_rank=True, sync_files=True)
    try:
        state_dict_saver.save(dict(tensors), storage_writer=writer, planner=_BoxesOut(), process_group=context.everyone)
    except CheckpointException as error:  # a BaseException: no `except Exception` would see it
        raise StateError(str(_first(error))) from error


def load(tensors: Mapping[str, Tensor | HeldTensor], path: str | Path, context: ParallelContext) -> None:
    """Overwrite the tensors in place with what `path` has under their names. Collective.

    Raises StateError when `path` has no complete state, or one of another model.
    """
    if not (Path(path) / ".metadata").is_file():
        raise StateError(f"{path} has no complete trainer state (.metadata is missing)")
    try:
        state_dict_loader.load(
            dict(tensors), storage_reader=SafeReader(path), planner=_BoxesIn(), process_group=context.everyone
        )
    except CheckpointException as error:
        raise StateError(f"{path} does not fit this model and optimizer: {_first(error)}") from error


class _BoxesOut(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        held = self.state_dict[index.fqn]
        return held.box_at(index, held.owned) if isinstance(held, HeldTensor) else super().lookup_object(index)


class _BoxesIn(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """torch's own looks for tensors on the meta device, and knows no `HeldTensor`."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator
        self.flatten_state_dict = False
        for name, held in state_dict.items():
            stored = metadata.state_dict_metadata.get(name) if metadata else None
            if isinstance(held, HeldTensor) and isinstance(stored, TensorStorageMetadata):
                held.check_dtype(name, stored.properties.dtype)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        held = self.state_dict[index.fqn]
        return held.box_at(index, held.held) if isinstance(held, HeldTensor) else super().lookup_tensor(index)


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
