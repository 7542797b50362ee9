"""The files of a Hugging Face folder, opened with care: whatever is wrong with one ends in a sentence about it."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ductile.core.layout.parameters import Part

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""What we read and write, and how safetensors spells it."""


class ModelFolderError(Exception):
    """A model folder that cannot be used. The text says which folder and file, what is wrong, and what to do."""


def read_json(path: Path) -> dict[str, Any]:
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


class WeightFiles:
    """The safetensors of a folder, one file or several, opened when first asked for a tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._opened: dict[str, Any] = {}
        self.listed_in = folder / WEIGHTS
        """The file that says which tensors there are."""
        self.file_of: dict[str, str] = {}
        """Tensor name -> file name."""

    def __enter__(self) -> "WeightFiles":
        if (self._folder / WEIGHTS).is_file():
            self.file_of = dict.fromkeys(self._open(WEIGHTS).keys(), WEIGHTS)
        elif (self._folder / INDEX).is_file():
            self.listed_in = self._folder / INDEX
            weight_map = read_json(self.listed_in).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise ModelFolderError(f"{self.listed_in} has no weight_map from names to files; download it again")
            self.file_of = weight_map
        else:
            hint = " It has pytorch_model.bin: convert that." if (self._folder / "pytorch_model.bin").exists() else ""
            raise ModelFolderError(
                f"{self._folder} has neither {WEIGHTS} nor {INDEX}; ductile reads weights from these only.{hint}"
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, part: Part) -> Tensor:
        file = self.file_of.get(part.name)
        if file is None:
            hint = "; if it is tied, set tie_word_embeddings to true" if part.name == "lm_head.weight" else ""
            raise ModelFolderError(f"{self.listed_in} does not have {part.name}, which {CONFIG} calls for{hint}")
        path = self._folder / file
        try:
            tensor = self._open(file).get_tensor(part.name)
        except SafetensorError as error:
            raise ModelFolderError(
                f"{path} does not have {part.name}, though {INDEX} says so; download it again"
            ) from error
        if tuple(tensor.shape) != part.shape:
            raise ModelFolderError(
                f"{path}: {part.name} has shape {list(tensor.shape)}, but {CONFIG} calls for {list(part.shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise ModelFolderError(
                f"{path}: {part.name} is {str(tensor.dtype).removeprefix('torch.')}; ductile reads float32, bfloat16 "
                "and float16, so save the model in one of these first"
            )
        return tensor

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            path = self._folder / file
            if Path(file).name != file:
                what = f"{self.listed_in} names {file}, which is not a file of its folder; download it again"
                raise ModelFolderError(what)
            if not path.is_file():
                raise ModelFolderError(f"{path} is missing, but {INDEX} names it; download it again")
            try:
                self._opened[file] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelFolderError(
                    f"{path} is not a whole safetensors file ({error}); download it again"
                ) from error
        return self._opened[file]
