"""A model's adapters as a folder of PEFT's: `adapter_config.json` and `adapter_model.safetensors`."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ductile.core.layout.model.parameters import HfTensor, parameters
from ductile.core.layout.model.spec import ModelSpec
from ductile.model.checkpoint import tensor_bytes
from ductile.model.safetensors_writer import write_safetensors

ADAPTER_FOLDER = "adapter"
"""Name of the folder, in that of the model."""
PREFIX = "base_model.model."
"""Prefix that PEFT writes before a name of the model's."""


def write_adapter(
    folder: Path, spec: ModelSpec, adapters: Mapping[str, Tensor], dtype: torch.dtype, base: Path
) -> None:
    """Write the adapters, which are full, under our names, as PEFT reads them. base: folder of the model that they are
    beside. Raises OSError."""
    if spec.lora is None:
        raise ValueError("the model has no adapters")
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.absolute()),
        "r": spec.lora.rank,
        "lora_alpha": spec.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(spec.lora.targets),
        "modules_to_save": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    ours = [each for each in parameters(spec) if each.is_trained]
    parts = [HfTensor(PREFIX + part.name, part.shape) for each in ours for part in each.parts]
    chunks = (tensor_bytes(adapters[each.name], each, dtype) for each in ours)
    write_safetensors(folder / "adapter_model.safetensors", parts, dtype, chunks)
