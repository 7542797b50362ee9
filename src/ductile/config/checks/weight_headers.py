"""Finds a model folder's weights, and says whether they are what its config.json calls for.

Told from names, indices and the headers of safetensors files, without torch and without any data. So the check of a
config and the slot that loads the weights check the same things, and a login node checks a large model at once.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ductile.core.layout.model.parameters import HfTensor, parameters
from ductile.core.layout.model.spec import ModelSpec
from ductile.user_files import NotText, read_text

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes that are read and written, as safetensors spells them and as torch does."""

_LENGTH_BYTES = 8
_MOST_BYTES = 100_000_000
"""Largest header of a safetensors file, in bytes, as the format says."""


class ModelFolderError(Exception):
    """A model folder that cannot be used. The text says which folder and file, what is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]


def find_weights(folder: Path, spec: ModelSpec) -> dict[str, Path]:
    """The file of each tensor that the model is made of, as Hugging Face names it. Raises ModelFolderError."""
    listed_in, file_of = _listed(folder)
    parts = [part for parameter in parameters(spec) for part in parameter.parts]
    _refuse_surplus(listed_in, file_of, {part.name for part in parts}, spec)
    headers: dict[str, dict[str, _Entry]] = {}
    for part in parts:
        file = file_of.get(part.name)
        if file is None:
            hint = "; if it is tied, set tie_word_embeddings to true" if part.name == "lm_head.weight" else ""
            raise ModelFolderError(f"{listed_in} does not have {part.name}, which {CONFIG} calls for{hint}")
        if file not in headers:
            headers[file] = _header(_plain(file, folder, listed_in))
        _refuse_unfit(folder / file, headers[file].get(part.name), part)
    return {part.name: folder / file_of[part.name] for part in parts}


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


def _listed(folder: Path) -> tuple[Path, dict[str, str]]:
    """The file that says which tensors there are, and for each of them the name of its file."""
    if (folder / WEIGHTS).is_file():
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


def _refuse_surplus(listed_in: Path, file_of: dict[str, str], expected: set[str], spec: ModelSpec) -> None:
    """A tensor that we would leave out (a bias, say) means another model than the one that `config.json` describes."""
    for name in file_of:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        cut_off = layer is not None and int(layer[1]) >= spec.num_layers
        # The last two: the copy that old writers made of tied embeddings, and a constant that old Llamas carry.
        if name in expected or cut_off or name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
            continue
        raise ModelFolderError(f"{listed_in} has {name}, which {CONFIG} does not call for: they do not belong together")


def _plain(file: str, folder: Path, listed_in: Path) -> Path:
    if Path(file).name != file:
        raise ModelFolderError(f"{listed_in} names {file}, which is not a file of its folder; download it again")
    if not (folder / file).is_file():
        raise ModelFolderError(f"{folder / file} is missing, but {INDEX} names it; download it again")
    return folder / file


def _refuse_unfit(file: Path, entry: _Entry | None, part: HfTensor) -> None:
    if entry is None:
        raise ModelFolderError(f"{file} does not have {part.name}, though {INDEX} says so; download it again")
    if entry.shape != part.shape:
        shapes = f"has shape {list(entry.shape)}, but {CONFIG} calls for {list(part.shape)}"
        raise ModelFolderError(f"{file}: {part.name} {shapes}")
    if entry.dtype not in DTYPES:
        what = f"is {entry.dtype}; ductile reads float32, bfloat16 and float16, so save the model in one of these first"
        raise ModelFolderError(f"{file}: {part.name} {what}")


def _header(file: Path) -> dict[str, _Entry]:
    """What a safetensors file says of its tensors."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            header = cast(dict[str, Any], json.loads(stream.read(min(length, _MOST_BYTES))))
        tables = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [int(entry["data_offsets"][1]) for entry in tables.values()]
        entries = {name: _Entry(str(entry["dtype"]), tuple(entry["shape"])) for name, entry in tables.items()}
    except OSError as error:
        raise ModelFolderError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelFolderError(f"{file} is not a whole safetensors file (no header); download it again") from error
    found_bytes, said_bytes = file.stat().st_size, _LENGTH_BYTES + length + max(ends, default=0)
    if found_bytes != said_bytes:
        what = f"is not a whole safetensors file ({found_bytes} bytes, and its header says {said_bytes})"
        raise ModelFolderError(f"{file} {what}; download it again")
    return entries
