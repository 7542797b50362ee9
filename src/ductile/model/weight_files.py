"""The weights of a Hugging Face folder, as tensors; `find_weights` has said which file has which."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ductile.config import weight_headers
from ductile.config.weight_headers import ModelFolderError, find_weights
from ductile.core.layout.parameters import HfTensor
from ductile.core.layout.spec import ModelSpec

DTYPES: dict[torch.dtype, str] = {getattr(torch, name): spelled for spelled, name in weight_headers.DTYPES.items()}
"""Dtypes that we read and write, and how safetensors spells them."""


class WeightFiles:
    """The safetensors of a folder, one file or several, opened when first asked for a tensor."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        """Raises ModelFolderError when the folder's tensors are not those of the model."""
        self._path_of = find_weights(folder, spec)
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, part: HfTensor) -> Tensor:
        path = self._path_of[part.name]
        try:
            if path not in self._opened:
                self._opened[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            return self._opened[path].get_tensor(part.name)
        except (SafetensorError, OSError) as error:
            raise ModelFolderError(f"{path} is not a whole safetensors file ({error}); download it again") from error
