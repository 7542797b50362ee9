"""The headers of a model folder's safetensors: does it have every tensor that its config.json calls for?

Read without torch and without any data, so that a login node can answer for a large model at once.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ductile.core.layout.parameters import parameters
from ductile.core.layout.spec import ModelSpec

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = frozenset({"F32", "BF16", "F16"})
_LENGTH_BYTES = 8
_MOST_BYTES = 100_000_000
"""Of a header, as the format says."""


class BadWeights(Exception):
    """Weights that no slot could load. The text names the file and what is wrong with it."""


def look_at_weights(folder: Path, spec: ModelSpec) -> None:
    """Raises BadWeights."""
    tensors = _tensors(folder)
    for part in (part for parameter in parameters(spec) for part in parameter.parts):
        header = tensors.get(part.name)
        if header is None:
            raise BadWeights(f"the weights in {folder} do not have {part.name}, which config.json calls for")
        if tuple(header["shape"]) != part.shape:
            shapes = f"{header['shape']}, and config.json calls for {list(part.shape)}"
            raise BadWeights(f"{part.name} in {folder} has shape {shapes}")
        if header["dtype"] not in DTYPES:
            raise BadWeights(f"{part.name} in {folder} is {header['dtype']}; ductile reads F32, BF16 and F16")


def _tensors(folder: Path) -> Mapping[str, Any]:
    """Name to header entry, of one file or of all that the index names."""
    if (folder / WEIGHTS).is_file():
        return _header(folder / WEIGHTS)
    try:
        weight_map = cast(dict[str, str], json.loads((folder / INDEX).read_bytes())["weight_map"])
        files = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadWeights(f"{folder} has neither {WEIGHTS} nor a {INDEX} that can be read") from None
    return {name: entry for file in files for name, entry in _header(folder / file).items()}


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            header = cast(object, json.loads(stream.read(min(length, _MOST_BYTES))))
        if not isinstance(header, dict):
            raise ValueError("its header is not a table")
        tensors = {name: entry for name, entry in cast(dict[str, Any], header).items() if name != "__metadata__"}
        ends = [int(entry["data_offsets"][1]) for entry in tensors.values()]
    except OSError as error:
        raise BadWeights(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise BadWeights(f"{file} is not a whole safetensors file; download it again") from None
    if file.stat().st_size != _LENGTH_BYTES + length + max(ends, default=0):
        raise BadWeights(f"{file} is not a whole safetensors file; download it again")
    return tensors
