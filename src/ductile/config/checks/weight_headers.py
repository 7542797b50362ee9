"""Files of a model folder's weights: names, dtypes and shapes of tensors, and in which file each lies.

Told from an index and the headers of safetensors files, without torch and without any data. Files that contradict each
other are refused.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from ductile.user_files import NotText, read_text

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes that are read and written, as safetensors spells them and as torch does."""
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}

_PART = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_LENGTH_BYTES = 8
_MOST_BYTES = 100_000_000
"""Largest header of a safetensors file, in bytes, as the format says."""


class ModelFolderError(Exception):
    """A model folder that cannot be used. The text says which folder and file, what is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file has it."""

    dtype: str
    """Spelled as safetensors does: "BF16"."""
    shape: tuple[int, ...]
    begin: int
    """Place in the file at which its bytes begin."""
    end: int

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a folder, told by their names."""

    listed_in: Path
    """The file that says which tensors there are."""
    file_of: Mapping[str, Path]
    entries: Mapping[str, StoredTensor]


def dtype_of_weights(folder: Path) -> str | None:
    """The dtype that most numbers of the folder's weights have, spelled as torch does; None where there are none that
    can be read."""
    weights = weights_of(folder)
    sizes: Counter[str] = Counter()
    for entry in weights.entries.values() if weights else ():
        sizes[entry.dtype] += entry.size
    return DTYPES.get(sizes.most_common(1)[0][0]) if sizes else None


def weights_of(folder: Path) -> Weights | None:
    """The weights' tensors; None where they cannot be read."""
    try:
        return read_headers(folder)
    except ModelFolderError:
        return None


def stranger(file: Path, folder: Path) -> Path | None:
    """Target of `file`, of a model folder, when it is a link to something that is no file of the folder.

    A link to a file of the same name is fine: people share a tokenizer so. So are the blobs of a Hugging Face cache,
    wherever that or its blobs lie: their names are digests.
    """
    target, home = Path(os.path.realpath(file)), Path(os.path.realpath(folder))
    of_its_cache = target.parent == Path(os.path.realpath(home.parent.parent / "blobs"))
    if target.name == file.name or home in target.parents or of_its_cache or any(map(_is_blob, _links(file))):
        return None
    return target


def _links(file: Path) -> Iterator[Path]:
    """Each path that a link leads to, and on from there."""
    for _ in range(40):  # as the kernel counts
        if not file.is_symlink():
            return
        file = Path(os.path.realpath(file.parent)) / file.readlink()
        yield file


def _is_blob(path: Path) -> bool:
    return path.parent.name == "blobs" and re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", path.name) is not None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder. Raises ModelFolderError."""
    if not path.parent.is_dir():
        raise ModelFolderError(f"there is no model folder {path.parent}")
    try:
        value = cast(object, json.loads(read_text(path)))
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path.parent} has no {path.name}, so it is not a Hugging Face model folder") from error
    except NotText as error:
        raise ModelFolderError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return cast(dict[str, Any], value)


def read_headers(folder: Path) -> Weights:
    """Names, dtypes and shapes of all tensors of a folder. Raises ModelFolderError where its files contradict each
    other."""
    listed_in, file_of = _listed(folder)
    for left in sorted(path.name for path in folder.iterdir() if _PART.fullmatch(path.name)):
        if left not in file_of.values():
            what = f"{listed_in} names no tensor of {left}, which is there too: which of them are the weights? Delete"
            raise ModelFolderError(f"{what} the other")
    if (folder / ADAPTER).is_file():
        what = f"{folder / ADAPTER} says that the model has an adapter (LoRA), which ductile does not read"
        raise ModelFolderError(f"{what}. Merge it into the weights, or delete the adapter's files")
    entries: dict[str, StoredTensor] = {}
    for file in sorted(set(file_of.values())):
        found = _header(_plain(file, folder, listed_in))
        for name in found:
            if file_of.get(name) != file:
                where = f"in {file_of[name]}" if name in file_of else "nowhere"
                what = f"{folder / file} has {name}, and {listed_in.name} says that it is {where}"
                raise ModelFolderError(f"{what}; download the folder again")
        entries |= found
    if missing := sorted(file_of.keys() - entries.keys()):
        what = f"{folder / file_of[missing[0]]} does not have {missing[0]}, though {INDEX} says so"
        raise ModelFolderError(f"{what}; download it again")
    return Weights(listed_in, {name: folder / file for name, file in file_of.items()}, entries)


def _listed(folder: Path) -> tuple[Path, dict[str, str]]:
    """The file that says which tensors there are, and for each of them the name of its file."""
    if (folder / WEIGHTS).is_file() and not (folder / INDEX).is_file():
        return folder / WEIGHTS, dict.fromkeys(_header(folder / WEIGHTS), WEIGHTS)
    index = folder / INDEX
    if not index.is_file():
        hint = " It has pytorch_model.bin: convert that." if (folder / "pytorch_model.bin").exists() else ""
        raise ModelFolderError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}; ductile reads weights from these only.{hint}"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in cast(dict[str, object], weight_map).values()
    ):
        raise ModelFolderError(f"{index} has no weight_map from names to files; download it again")
    return index, cast(dict[str, str], weight_map)


def _plain(file: str, folder: Path, listed_in: Path) -> Path:
    if Path(file).name != file:
        raise ModelFolderError(f"{listed_in} names {file}, which is not a file of its folder; download it again")
    if not (folder / file).is_file():
        raise ModelFolderError(f"{folder / file} is missing, but {INDEX} names it; download it again")
    return folder / file


def _header(file: Path) -> dict[str, StoredTensor]:
    """What a safetensors file says of its tensors."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            header = cast(dict[str, Any], json.loads(stream.read(min(length, _MOST_BYTES))))
        tables = {name: entry for name, entry in header.items() if name != "__metadata__"}
        entries: dict[str, StoredTensor] = {}
        for name, table in tables.items():
            begin, end = (_LENGTH_BYTES + length + int(offset) for offset in table["data_offsets"])
            entries[name] = StoredTensor(str(table["dtype"]), tuple(map(int, table["shape"])), begin, end)
    except OSError as error:
        raise ModelFolderError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelFolderError(f"{file} is not a whole safetensors file (no header); download it again") from error
    found_bytes = file.stat().st_size
    said_bytes = max((entry.end for entry in entries.values()), default=_LENGTH_BYTES + length)
    if found_bytes != said_bytes:
        what = f"is not a whole safetensors file ({found_bytes} bytes, and its header says {said_bytes})"
        raise ModelFolderError(f"{file} {what}; download it again")
    return entries
