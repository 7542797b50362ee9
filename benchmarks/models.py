"""The benchmarks' models of about 100 M parameters, as folders with random weights."""

import json
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    **SIZES,
}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
"""Sizes that only show whether a benchmark works."""


def make_model(folder: Path, shape: dict[str, Any] = QWEN3) -> int:
    """A model folder with random weights; returns the number of parameters."""
    from ductile.model.checkpoint import random_tensors, read_spec, save_model

    source = folder.with_name("source")
    source.mkdir()
    (source / "config.json").write_text(json.dumps(shape))
    spec = read_spec(source)
    save_model(folder, spec, dict(random_tensors(spec, 0)), source)
    return spec.num_parameters
