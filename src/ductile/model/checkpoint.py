"""Hugging Face model folders: read one into a `Transformer`, write one that `transformers` loads.

Both ways go parameter by parameter (`ductile.core.layout.parameters`), so that neither ever holds the model twice.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ductile.core.layout.parameters import Parameter, parameters
from ductile.core.layout.spec import ModelSpec, SpecError, spec_from_hf
from ductile.model.safetensors_writer import Entry, write_safetensors
from ductile.model.transformer import Transformer

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "LICENSE",
)
"""What a saved folder takes over from its source, where it is there."""

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class ModelFolderError(Exception):
    """A model folder that cannot be used. The text says which folder and file, what is wrong, and what to do."""


# -- Reading ---------------------------------------------------------------------------------------------------------


def read_spec(folder: str | Path) -> ModelSpec:
    """The model that `config.json` describes."""
    path = Path(folder) / CONFIG
    try:
        return spec_from_hf(_read_json(path))
    except SpecError as error:
        raise ModelFolderError(f"{path}: {error}") from error


def load_model(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    random_init: bool = False,
    num_layers: int | None = None,
    seed: int = 0,
) -> Transformer:
    """Build the folder's model on `device`, its first `num_layers` layers or all.

    With `random_init` only `config.json` is read, and equal seeds give equal weights.
    """
    spec = read_spec(folder)
    if num_layers is not None:
        spec = truncate(spec, num_layers, folder)
    with torch.device("meta"):
        model = Transformer(spec)
    model = model.to(dtype).to_empty(device=device)
    tensors = random_tensors(spec, seed) if random_init else read_tensors(folder, spec)
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors:
            ours[name].copy_(tensor)
    return model


def truncate(spec: ModelSpec, num_layers: int, folder: str | Path) -> ModelSpec:
    """The same model with its first layers only."""
    if not 1 <= num_layers <= spec.num_layers:
        raise ModelFolderError(f"{folder} has {spec.num_layers} layers; num_layers must be 1 to that, not {num_layers}")
    return replace(spec, num_layers=num_layers)


def read_tensors(folder: str | Path, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Our names and full tensors, in the order of `parameters(spec)`, in the file's dtype. One at a time in memory."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelFolderError(f"there is no model folder {folder}")
    files = _weight_files(folder)
    with ExitStack() as stack:
        opened: dict[str, Any] = {}
        for parameter in parameters(spec):
            yield parameter.name, _read_parameter(folder, files, parameter, opened, stack)


def random_tensors(spec: ModelSpec, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Our names and random fp32 tensors: normal weights, norms of one, biases of zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters(spec):
        if parameter.name.endswith("norm.weight"):
            yield parameter.name, torch.ones(parameter.shape)
        elif parameter.name.endswith(".bias"):
            yield parameter.name, torch.zeros(parameter.shape)
        else:
            yield parameter.name, torch.empty(parameter.shape).normal_(0.0, spec.initializer_range, generator=generator)


def _weight_files(folder: Path) -> Mapping[str, str] | None:
    """Tensor name -> file name of a sharded folder; None where all tensors are in one file."""
    if (folder / WEIGHTS).is_file():
        return None
    if not (folder / INDEX).is_file():
        hint = " (it has pytorch_model.bin: convert it)" if (folder / "pytorch_model.bin").exists() else ""
        raise ModelFolderError(f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}; ductile reads safetensors only")
    files = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict):
        raise ModelFolderError(f"{folder / INDEX} has no weight_map; download the file again")
    return files


def _read_parameter(
    folder: Path, files: Mapping[str, str] | None, parameter: Parameter, opened: dict[str, Any], stack: ExitStack
) -> Tensor:
    parts: list[Tensor] = []
    for part in parameter.parts:
        file = WEIGHTS if files is None else files.get(part.name)
        if file is None:
            raise ModelFolderError(f"{folder / INDEX} does not list {part.name}, which {CONFIG} calls for")
        if file not in opened:
            opened[file] = _open(folder / file, stack)
        if part.name not in opened[file].keys():  # noqa: SIM118 (not a dict)
            raise ModelFolderError(f"{folder / file} does not have {part.name}, which {CONFIG} calls for")
        tensor = opened[file].get_tensor(part.name)
        if tuple(tensor.shape) != part.shape:
            raise ModelFolderError(
                f"{folder / file}: {part.name} has shape {list(tensor.shape)}, "
                f"but {CONFIG} calls for {list(part.shape)}"
            )
        parts.append(tensor)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _open(path: Path, stack: ExitStack) -> Any:
    if not path.is_file():
        raise ModelFolderError(f"{path} is missing, but {INDEX} names it; download it again")
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(f"{path} is not a whole safetensors file ({error}); download it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise ModelFolderError(f"there is no model folder {path.parent}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path.parent} has no {path.name}, so it is not a Hugging Face model folder") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


# -- Writing ---------------------------------------------------------------------------------------------------------


def save_model(
    folder: str | Path,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    source: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a Hugging Face folder: weights, and `source`'s config and tokenizer files. `dtype` None keeps the tensors'.

    `tensors` are full, under our names; each is asked for once, in the order of `parameters(spec)`, and let go before
    the next, so a mapping that gathers on demand is enough. The folder appears whole or not at all; one that was there
    before is replaced.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        building.chmod(0o755)
        written = dtype or tensors[parameters(spec)[0].name].dtype
        _write_config(building, spec, Path(source), written)
        _write_weights(building, spec, tensors, written, max_shard_bytes)
        _replace(folder, building)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_config(building: Path, spec: ModelSpec, source: Path, dtype: torch.dtype) -> None:
    config = _read_json(source / CONFIG)
    config["num_hidden_layers"] = spec.num_layers
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][: spec.num_layers]
    # transformers 5 writes `dtype`, 4 wrote `torch_dtype`; both read either.
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    (building / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, building / name)


def _write_weights(
    building: Path, spec: ModelSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype, max_shard_bytes: int
) -> None:
    shards = _shards(spec, dtype.itemsize, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        entries = [Entry(part.name, DTYPES[dtype], part.shape, dtype.itemsize) for p in shard for part in p.parts]
        write_safetensors(building / file, entries, (_bytes(tensors[p.name], p, dtype) for p in shard))
        weight_map |= {entry.name: file for entry in entries}
    if len(shards) > 1:
        index = {"metadata": {"total_size": spec.num_parameters * dtype.itemsize}, "weight_map": weight_map}
        (building / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(spec: ModelSpec, itemsize: int, max_shard_bytes: int) -> list[list[Parameter]]:
    shards: list[list[Parameter]] = [[]]
    room = max_shard_bytes
    for parameter in parameters(spec):
        size = torch.Size(parameter.shape).numel() * itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(parameter)
        room -= size
    return shards


def _bytes(tensor: Tensor, parameter: Parameter, dtype: torch.dtype) -> memoryview:
    """The parts lie in our tensor as they lie in the file: one below the other."""
    if tuple(tensor.shape) != parameter.shape:
        raise ValueError(f"{parameter.name} has shape {list(tensor.shape)}, not {list(parameter.shape)}")
    whole = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    return memoryview(whole.flatten().view(torch.uint8).numpy().data)


def _replace(folder: Path, building: Path) -> None:
    """A directory cannot be renamed over a filled one, so the old one steps aside first."""
    if folder.exists():
        old = building.with_name(building.name + ".old")
        folder.rename(old)
        building.rename(folder)
        shutil.rmtree(old)
    else:
        building.rename(folder)
