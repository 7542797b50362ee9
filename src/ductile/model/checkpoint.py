"""Hugging Face model folders: read one into a `Transformer`, write one that `transformers` loads.

Both ways go parameter by parameter (`ductile.core.layout.model.parameters`), so that neither ever holds the model
twice.
"""

import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ductile.config.checks.model_weights import find_weights
from ductile.config.checks.weight_headers import (
    CONFIG,
    INDEX,
    WEIGHTS,
    ModelFolderError,
    dtype_of_weights,
    read_json,
    stranger,
)
from ductile.core.layout.model.lora import LoraSpec
from ductile.core.layout.model.parameters import HfTensor, Parameter, parameters
from ductile.core.layout.model.spec import ModelSpec, SpecError, spec_from_hf
from ductile.disk import exchange, named, sync, sync_tree
from ductile.model.adapters import first_adapters
from ductile.model.safetensors_writer import DTYPES, write_safetensors
from ductile.model.transformer import Transformer
from ductile.records import AS_IN_SOURCE, ChatFormat

GENERATION_CONFIG = "generation_config.json"
COPIED = (
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "LICENSE",
)
"""Files that a saved folder takes over from its source, where they are there."""
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
"""Files of chat templates, besides that of tokenizer_config.json: taken over, too, unless another takes their place."""

MAX_SHARD_BYTES = 5_000_000_000
"""Most bytes of weights in one file, as `transformers` writes them."""

# -- Reading ---------------------------------------------------------------------------------------------------------


def read_spec(folder: str | Path, num_layers: int | None = None, lora: LoraSpec | None = None) -> ModelSpec:
    """The model that `config.json` describes, with its first `num_layers` layers or all, and with such adapters."""
    path = Path(folder) / CONFIG
    try:
        spec = replace(spec_from_hf(read_json(path)), lora=lora)
    except SpecError as error:
        raise ModelFolderError(f"{path}: {error}") from error
    if num_layers is None:
        return spec
    if not 1 <= num_layers <= spec.num_layers:
        raise ModelFolderError(f"{folder} has {spec.num_layers} layers; num_layers must be 1 to that, not {num_layers}")
    return replace(spec, num_layers=num_layers)


def stored_dtype(folder: str | Path) -> torch.dtype | None:
    """The dtype of most of the folder's weights; where there are none, what `config.json` says; None where it does not,
    or says one that we do not write."""
    if found := dtype_of_weights(Path(folder)):
        return dtype_named(found)
    config = read_json(Path(folder) / CONFIG)
    return dtype_named(config.get("dtype", config.get("torch_dtype")))  # transformers 5's word, and 4's


def dtype_named(name: object) -> torch.dtype | None:
    """The torch dtype of that name, such as "bfloat16"; None for one that we do not write."""
    return next((dtype for dtype in DTYPES if str(dtype) == f"torch.{name}"), None)


def load_model(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    random_init: bool = False,
    num_layers: int | None = None,
    seed: int = 0,
    lora: LoraSpec | None = None,
) -> Transformer:
    """Build the folder's model on `device`, its first `num_layers` layers or all, with the adapters that training
    begins with.

    With `random_init` only `config.json` is read, and equal seeds give equal weights.
    """
    spec = read_spec(folder, num_layers, lora)
    model = empty_model(spec, dtype, device)
    tensors = first_tensors(folder, spec, random_init, seed)
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors:
            ours[name].copy_(tensor)
    return model


def empty_model(spec: ModelSpec, dtype: torch.dtype, device: str | torch.device) -> Transformer:
    """A model for weights that come from elsewhere: until then they are whatever lay in that memory."""
    with torch.device("meta"):
        model = Transformer(spec)
    return model.to(dtype).to_empty(device=device)


def first_tensors(
    folder: str | Path, spec: ModelSpec, random_init: bool = False, seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Our names and full tensors of what training begins with: the folder's, or random ones, and the adapters of the
    spec. Raises ModelFolderError as `read_tensors` does."""
    yield from random_tensors(spec, seed) if random_init else read_tensors(folder, spec)
    yield from first_adapters(spec, seed)


def read_tensors(folder: str | Path, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Our names and full tensors, in the order of `parameters(spec.base)`, in the file's dtype. One at a time in
    memory. Raises ModelFolderError when the folder's tensors are not those of the model."""
    path_of = find_weights(Path(folder), spec.base, read_spec(folder).num_layers)
    opened: dict[Path, Any] = {}
    with ExitStack() as stack:

        def read(part: HfTensor) -> Tensor:
            path = path_of[part.name]
            try:
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                return _finite(opened[path].get_tensor(part.name), part.name, path)
            except (SafetensorError, OSError) as error:
                raise ModelFolderError(
                    f"{path} is not a whole safetensors file ({error}); download it again"
                ) from error

        for parameter in parameters(spec.base):
            parts = [read(part) for part in parameter.parts]
            yield parameter.name, parts[0] if len(parts) == 1 else torch.cat(parts)


def _finite(tensor: Tensor, name: str, path: Path) -> Tensor:
    """The tensor. Raises ModelFolderError where it has a number that is none: the model would say nothing else."""
    if not _is_finite(tensor):
        wrong = ~tensor.isfinite()
        where = wrong.nonzero()[0].tolist()
        what = f"has {int(wrong.sum()):,} of {tensor.numel():,} numbers that are NaN or infinite, the first at {where}"
        raise ModelFolderError(f"{path}: {name} {what}; download it again, or save it anew")
    return tensor


def _is_finite(tensor: Tensor) -> bool:
    return all(bound.isfinite() for bound in tensor.aminmax())  # either is NaN where any number is


def random_tensors(spec: ModelSpec, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Our names and random fp32 tensors: normal weights, norms of one, biases of zero. Adapters are not among them."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters(spec.base):
        if parameter.name.endswith("norm.weight"):
            yield parameter.name, torch.ones(parameter.shape)
        elif parameter.name.endswith(".bias"):
            yield parameter.name, torch.zeros(parameter.shape)
        else:
            yield parameter.name, torch.empty(parameter.shape).normal_(0.0, spec.initializer_range, generator=generator)


# -- Writing ---------------------------------------------------------------------------------------------------------


def save_model(
    folder: str | Path,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    source: str | Path,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    chat_format: ChatFormat = AS_IN_SOURCE,
) -> None:
    """Write a Hugging Face folder: weights, and `source`'s config and tokenizer files, which say the `chat_format`.

    `tensors` are full, under our names; each is asked for once, in the order of `parameters(spec)`, and let go before
    the next, so a mapping that gathers on demand is enough. The folder appears whole or not at all; one that was there
    before is replaced. Raises DiskError when it cannot be written, or ModelFolderError where `dtype` has
    no room for a number.
    """
    in_order = (tensors[parameter.name] for parameter in parameters(spec))
    begin_folder(folder, spec, source, dtype, max_shard_bytes, chat_format)
    try:
        write_weights(folder, spec, in_order, dtype, max_shard_bytes)
        finish_folder(folder)
    finally:
        discard_folder(folder)


def begin_folder(
    folder: str | Path,
    spec: ModelSpec,
    source: str | Path,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    chat_format: ChatFormat = AS_IN_SOURCE,
) -> None:
    """Write all of a folder but the weights, under another name: `write_weights` goes on there, then `finish_folder`
    gives it its name, or `discard_folder` deletes it. Raises DiskError."""
    folder, building, old = _names(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(building, ignore_errors=True)  # left by a writer that was killed
        if old.exists() and not folder.exists():
            old.rename(folder)  # the writer was killed between two renames
        building.mkdir()
        _write_config(building, spec, Path(source), dtype)
        _copy_others(building, Path(source), COPIED if chat_format.templates else (*COPIED, *CHAT_TEMPLATES))
        _write_chat_format(building, chat_format)
        _write_index(building, spec, dtype, max_shard_bytes)
    except OSError as error:
        discard_folder(folder)
        raise named(error, folder) from error
    except BaseException:
        discard_folder(folder)
        raise


def finish_folder(folder: str | Path) -> None:
    """Give a folder that is whole its name, in the place of one that was there. Raises DiskError."""
    folder, building, old = _names(folder)
    try:
        _replace(folder, building, old)
    except OSError as error:
        raise named(error, folder) from error


def unfinished(folder: str | Path) -> Path:
    """Return where a folder is that `begin_folder` has begun, until it has its name."""
    return _names(folder)[1]


def discard_folder(folder: str | Path) -> None:
    """Delete what `begin_folder` has begun, if it has not got its name."""
    _, building, _ = _names(folder)
    shutil.rmtree(building, ignore_errors=True)


def _names(folder: str | Path) -> tuple[Path, Path, Path]:
    """The folder; what it is called before it is whole; what it is called while another one takes its place."""
    folder = Path(folder)
    building, old = (folder.with_name(f".{folder.name}.{word}") for word in ("partial", "old"))
    return folder, building, old


def _write_config(building: Path, spec: ModelSpec, source: Path, dtype: torch.dtype) -> None:
    config = read_json(source / CONFIG)
    config["num_hidden_layers"] = spec.num_layers
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][: spec.num_layers]
    config["tie_word_embeddings"] = spec.tie_embeddings
    # transformers 5 writes `dtype`, 4 wrote `torch_dtype`; both read either.
    for key in config.keys() & {"torch_dtype", "dtype"} or {"dtype"}:
        config[key] = str(dtype).removeprefix("torch.")
    (building / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _copy_others(building: Path, source: Path, patterns: Sequence[str]) -> None:
    for file in (file for pattern in patterns for file in sorted(source.glob(pattern)) if file.is_file()):
        if target := stranger(file, source):
            raise ModelFolderError(f"{file} is a link to {target}, which is not copied into a model")
        copy = building / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def _write_chat_format(building: Path, chat_format: ChatFormat) -> None:
    """Have others write conversations as the policy was trained on them, and stop it where it ends its turns."""
    for name, text in chat_format.templates.items():
        file = building / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="")
    if chat_format.templates:
        path = building / TOKENIZER_CONFIG
        if path.is_file() and "chat_template" in (settings := read_json(path)):
            del settings["chat_template"]
            _write_json(path, settings)
    path, config = building / GENERATION_CONFIG, read_json(building / CONFIG)
    # Without that file transformers take these keys from config.json, and with it they do not.
    of_config = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    settings = read_json(path) if path.is_file() else of_config
    known = settings.get("eos_token_id", config.get("eos_token_id"))
    if not set(chat_format.eos_token_ids) <= set(known if isinstance(known, list) else [known]):
        _write_json(path, settings | {"eos_token_id": list(chat_format.eos_token_ids)})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(
    folder: str | Path,
    spec: ModelSpec,
    tensors: Iterator[Tensor],
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    writer: int = 0,
    num_writers: int = 1,
) -> None:
    """Write one writer's files into a folder that is begun: of several writers, each has every `num_writers`-th file.
    `tensors` are all parameters in their order. Raises DiskError, or ModelFolderError where `dtype` has
    no room for a number."""
    folder, building, _ = _names(folder)
    for number, (file, shard) in enumerate(_files(spec, dtype, max_shard_bytes)):
        of_shard = itertools.islice(tensors, len(shard))
        if number % num_writers != writer:
            for _ in of_shard:
                pass
            continue
        parts = [part for parameter in shard for part in parameter.parts]
        chunks = (tensor_bytes(tensor, parameter, dtype) for parameter, tensor in zip(shard, of_shard, strict=True))
        try:
            write_safetensors(building / file, parts, dtype, chunks)
        except OSError as error:
            raise named(error, folder) from error


def _write_index(building: Path, spec: ModelSpec, dtype: torch.dtype, max_shard_bytes: int) -> None:
    files = _files(spec, dtype, max_shard_bytes)
    if len(files) > 1:
        weight_map = {part.name: file for file, shard in files for parameter in shard for part in parameter.parts}
        index = {"metadata": {"total_size": spec.num_parameters * dtype.itemsize}, "weight_map": weight_map}
        (building / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _files(spec: ModelSpec, dtype: torch.dtype, max_shard_bytes: int) -> list[tuple[str, list[Parameter]]]:
    """The safetensors files of a folder, each with its parameters in their order."""
    shards = _shards(spec, dtype.itemsize, max_shard_bytes)
    if len(shards) == 1:
        return [(WEIGHTS, shards[0])]
    return [
        (f"model-{number:05d}-of-{len(shards):05d}.safetensors", shard) for number, shard in enumerate(shards, start=1)
    ]


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


def tensor_bytes(tensor: Tensor, parameter: Parameter, dtype: torch.dtype) -> memoryview:
    """A full tensor as a file has it: its parts lie there as they lie in ours, one below the other. Raises
    ModelFolderError where `dtype` has no room for a number."""
    if tuple(tensor.shape) != parameter.shape:
        raise ValueError(f"{parameter.name} has shape {list(tensor.shape)}, not {list(parameter.shape)}")
    whole = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    if not _is_finite(whole):
        largest, name = float(tensor.detach().abs().max()), str(dtype).removeprefix("torch.")
        what = f"has numbers up to {largest:.3g}, and as {name} some are NaN or infinite"
        raise ModelFolderError(f"{parameter.name} {what}; give another ckpt.export_dtype")
    # Not `Tensor.numpy`: after it torch would let the trainer's memory never be freed and filled (`trainer.parking`).
    return memoryview(np.from_dlpack(whole.flatten().view(torch.uint8)).data)


def _replace(folder: Path, building: Path, old: Path) -> None:
    """The folder is there at every moment, where the file system can swap two names; else the old one steps aside
    first."""
    sync_tree(building)
    if not folder.exists():
        building.rename(folder)
    else:
        _delete(old)
        if exchange(building, folder):
            building.rename(old)
        else:
            folder.rename(old)
            building.rename(folder)
    sync(folder.parent)
    _delete(old)


def _delete(folder: Path) -> None:
    """Remove the folder; of a link, only the link itself."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)
