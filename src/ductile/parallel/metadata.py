"""Reading the metadata of torch's distributed checkpoints without running what a stranger wrote into it.

`.metadata` is a pickle, and `torch.distributed.checkpoint` loads it as one: a user who can write into the folder could
have the reader call anything. Here a pickle may only name the classes that such a file is made of.
"""

import io
import pickle
from importlib import import_module
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath"},
}  # fmt: skip
"""Names that a pickle may name, by module; none of them does more than hold values. `BytesStorageMetadata` is not here:
torch unpickles what it describes."""


class UnsafeMetadata(Exception):
    """Metadata that no trainer of ours wrote. The text says what is in it."""


class SafeReader(FileSystemReader):
    """Reads tensors only, from files of its own folder only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = self.fs.concat_path(self.path, ".metadata")
        with self.fs.create_stream(file, "rb") as stream:
            metadata = _checked(_load(stream.read()))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def _load(pickled: bytes) -> object:
    """Unpickle metadata. Raises UnsafeMetadata, too, where the pickle sets attributes of what it names: these classes
    are the whole process's."""
    named = [getattr(import_module(module), name) for module, names in ALLOWED.items() for name in names]
    classes = [each for each in named if hasattr(each, "__dict__")]
    before = [dict(vars(each)) for each in classes]
    try:
        return _Unpickler(io.BytesIO(pickled)).load()
    finally:
        changed = [
            _undo(each, attributes)
            for each, attributes in zip(classes, before, strict=True)
            if dict(vars(each)) != attributes
        ]
        if changed:
            raise UnsafeMetadata(f".metadata changes {changed[0]}, which no checkpoint does")


def _undo(named: Any, attributes: dict[str, Any]) -> str:
    for name in [*vars(named)]:
        if name not in attributes:
            delattr(named, name)
        elif vars(named)[name] is not attributes[name]:
            setattr(named, name, attributes[name])
    return f"{named.__module__}.{named.__qualname__}"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise UnsafeMetadata(f".metadata names {module}.{name}, which no checkpoint needs")


def _checked(metadata: object) -> Metadata:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise UnsafeMetadata(".metadata is no checkpoint's")
    for info in metadata.storage_data.values():
        if PurePath(info.relative_path).name != str(info.relative_path):
            raise UnsafeMetadata(f".metadata names the file {info.relative_path}, which is not in its folder")
    return metadata
