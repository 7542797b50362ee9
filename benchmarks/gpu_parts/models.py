"""Shapes of models, and folders that ductile reads them from."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from gpu_parts.part import Setting

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "0.1B": QWEN3
    | {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32_000,
    },
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}


def shape_of(name: str, setting: Setting) -> dict[str, Any]:
    return SHAPES[name] | (SMALL if setting.small else {})


def make_folder(folder: Path, shape: dict[str, Any]) -> Path:
    """With a config and a tokenizer, and no weights: those are random, or come from a slot that has them."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape))
    tokenizer = Tokenizer(WordLevel({"<eos>": 0, **{f"w{i}": i for i in range(1, 64)}}, unk_token="<eos>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder
