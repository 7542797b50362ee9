"""Finds a model folder's weights, and says whether they are what its config.json calls for.

Told from names, indices and the headers of safetensors files, without torch, and without any data but that of an output
head beside tied embeddings. So the check of a config and the slot that loads the weights check the same things, and a
login node checks a large model at once. What the files have and config.json does not call for is refused: it means
another model than the one that config.json describes.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ductile.core.layout.model.parameters import HfTensor, parameters
from ductile.core.layout.model.spec import ModelSpec
from ductile.user_files import NotText, read_text

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes that are read and written, as safetensors spells them and as torch does."""
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}

_ROTATIONS = ".rotary_emb.inv_freq"
"""End of the name of a constant that old Llamas carry: it follows from `head_dim` and `rope_theta`."""
_PART = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_LENGTH_BYTES = 8
_MOST_BYTES = 100_000_000
"""Largest header of a safetensors file, in bytes, as the format says."""
_CHUNK_BYTES = 1 << 24


class ModelFolderError(Exception):
    """A model folder that cannot be used. The text says which folder and file, what is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Place in the file at which its bytes begin."""
    end: int

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Weights:
    """The tensors of a folder, told by their names."""

    listed_in: Path
    """The file that says which tensors there are."""
    file_of: Mapping[str, Path]
    entries: Mapping[str, _Entry]


def find_weights(folder: Path, spec: ModelSpec, num_layers: int | None = None) -> dict[str, Path]:
    """The file of each tensor that the model is made of, as Hugging Face names it. Raises ModelFolderError.

    num_layers: of the model that the folder holds, where `spec` has fewer.
    """
    weights = _read_headers(folder)
    _refuse_surplus(weights, spec, num_layers or spec.num_layers)
    parts = [part for parameter in parameters(spec) for part in parameter.parts]
    for part in parts:
        if part.name not in weights.entries:
            hint = "; if it is tied, set tie_word_embeddings to true" if part.name == HEAD else _bias_hint(part.name)
            raise ModelFolderError(f"{weights.listed_in} does not have {part.name}, which {CONFIG} calls for{hint}")
        _refuse_unfit(weights.file_of[part.name], weights.entries[part.name], part)
    if spec.tie_embeddings and HEAD in weights.entries:
        _refuse_another_head(weights)
    return {part.name: weights.file_of[part.name] for part in parts}


def dtype_of_weights(folder: Path) -> str | None:
    """The dtype that most numbers of the folder's weights have, spelled as torch does; None where there are none that
    can be read."""
    try:
        entries = _read_headers(folder).entries.values()
    except ModelFolderError:
        return None
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[entry.dtype] += entry.size
    return DTYPES.get(sizes.most_common(1)[0][0]) if sizes else None


def sample_of_weights(folder: Path, num_numbers: int = 1 << 14) -> NDArray[np.float32] | None:
    """About so many of the weights' numbers, of each tensor its share, from its middle; None where they cannot be
    read."""
    try:
        weights = _read_headers(folder)
        entries = {name: entry for name, entry in weights.entries.items() if entry.dtype in ITEM_BYTES}
        total = max(1, sum(entry.size for entry in entries.values()))
        sampled: list[NDArray[np.float32]] = []
        for name, entry in entries.items():
            num = -(-entry.size * num_numbers // max(total, num_numbers))
            begin = entry.begin + (entry.size - num) // 2 * ITEM_BYTES[entry.dtype]
            sampled += _numbers(weights.file_of[name], replace(entry, shape=(num,), begin=begin))
    except ModelFolderError:
        return None
    return np.concatenate(sampled) if sampled else None


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


def _read_headers(folder: Path) -> _Weights:
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
    entries: dict[str, _Entry] = {}
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
    return _Weights(listed_in, {name: folder / file for name, file in file_of.items()}, entries)


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


def _refuse_surplus(weights: _Weights, spec: ModelSpec, num_layers: int) -> None:
    expected = {part.name for parameter in parameters(spec) for part in parameter.parts} | {HEAD}
    surplus: list[str] = []
    for name, entry in weights.entries.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if name in expected or (layer is not None and spec.num_layers <= int(layer[1]) < num_layers):
            continue
        if not name.endswith(_ROTATIONS):
            surplus.append(name)
        elif entry.shape != (spec.head_dim // 2,):
            _refuse_unfit(weights.file_of[name], entry, HfTensor(name, (spec.head_dim // 2,)))
    if surplus:
        first, *others = sorted(surplus)
        more = f" and {len(others)} more, such as {others[-1]}" if others else ""
        beyond = re.match(r"model\.layers\.(\d+)\.", first)
        hint = _bias_hint(first)
        if beyond is not None and int(beyond[1]) >= num_layers:
            hint = f" (num_hidden_layers is {num_layers})"
        what = f"{weights.listed_in} has {first}{more}, which {CONFIG} does not call for{hint}"
        raise ModelFolderError(f"{what}: they do not belong together")


def _bias_hint(name: str) -> str:
    """The key of config.json that says whether there is a tensor of that name."""
    if not name.endswith(".bias"):
        return ""
    return f" ({'mlp_bias' if '.mlp.' in name else 'attention_bias'} says which)"


def _refuse_another_head(weights: _Weights) -> None:
    """Old writers made a copy of tied embeddings, which says nothing new. Another head is of another model."""
    embeddings, head = weights.entries[EMBEDDINGS], weights.entries[HEAD]
    file = weights.file_of[HEAD]
    _refuse_unfit(file, head, HfTensor(HEAD, embeddings.shape))
    differing = sum(
        int(np.count_nonzero(_rounded(ours, head.dtype) != theirs))
        for ours, theirs in zip(_numbers(weights.file_of[EMBEDDINGS], embeddings), _numbers(file, head), strict=True)
    )
    if differing:
        raise ModelFolderError(
            f"{file} has an output head that {CONFIG} does not let the model have: {differing:,} of the {head.size:,} "
            f"numbers of {HEAD} are not those of {EMBEDDINGS}, and tie_word_embeddings is true. Write false there, to "
            f"use the head, or save the folder without {HEAD}"
        )


def _numbers(file: Path, entry: _Entry) -> Iterator[NDArray[np.float32]]:
    """A tensor's numbers, some at a time, as many whatever the dtype."""
    num_each = _CHUNK_BYTES // 4
    try:
        with file.open("rb") as stream:
            stream.seek(entry.begin)
            for first in range(0, entry.size, num_each):
                read = stream.read(min(num_each, entry.size - first) * ITEM_BYTES[entry.dtype])
                if entry.dtype == "BF16":  # the upper half of a float32
                    yield (np.frombuffer(read, "<u2").astype(np.uint32) << 16).view(np.float32)
                else:
                    yield np.frombuffer(read, "<f4" if entry.dtype == "F32" else "<f2").astype(np.float32)
    except OSError as error:
        raise ModelFolderError(f"{file} cannot be read: {error.strerror}") from error


def _rounded(numbers: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """The numbers as a tensor of that dtype holds them."""
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).astype(np.float32)
    if dtype == "BF16":
        bits = numbers.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return numbers


def _plain(file: str, folder: Path, listed_in: Path) -> Path:
    if Path(file).name != file:
        raise ModelFolderError(f"{listed_in} names {file}, which is not a file of its folder; download it again")
    if not (folder / file).is_file():
        raise ModelFolderError(f"{folder / file} is missing, but {INDEX} names it; download it again")
    return folder / file


def _refuse_unfit(file: Path, entry: _Entry, part: HfTensor) -> None:
    if entry.shape != part.shape:
        shapes = f"has shape {list(entry.shape)}, but {CONFIG} calls for {list(part.shape)}"
        raise ModelFolderError(f"{file}: {part.name} {shapes}")
    if entry.dtype not in DTYPES:
        what = f"is {entry.dtype}; ductile reads float32, bfloat16 and float16, so save the model in one of these first"
        raise ModelFolderError(f"{file}: {part.name} {what}")
    if entry.end - entry.begin != entry.size * ITEM_BYTES[entry.dtype]:
        what = f"has {entry.end - entry.begin} bytes, which its shape and {entry.dtype} do not have; download it again"
        raise ModelFolderError(f"{file}: {part.name} {what}")


def _header(file: Path) -> dict[str, _Entry]:
    """What a safetensors file says of its tensors."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            header = cast(dict[str, Any], json.loads(stream.read(min(length, _MOST_BYTES))))
        tables = {name: entry for name, entry in header.items() if name != "__metadata__"}
        entries: dict[str, _Entry] = {}
        for name, table in tables.items():
            begin, end = (_LENGTH_BYTES + length + int(offset) for offset in table["data_offsets"])
            entries[name] = _Entry(str(table["dtype"]), tuple(map(int, table["shape"])), begin, end)
    except OSError as error:
        raise ModelFolderError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelFolderError(f"{file} is not a whole safetensors file (no header); download it again") from error
    found_bytes, said_bytes = (
        file.stat().st_size,
        max((entry.end for entry in entries.values()), default=_LENGTH_BYTES + length),
    )
    if found_bytes != said_bytes:
        what = f"is not a whole safetensors file ({found_bytes} bytes, and its header says {said_bytes})"
        raise ModelFolderError(f"{file} {what}; download it again")
    return entries
