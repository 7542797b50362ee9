"""The models that parity is shown with, and how they are trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ductile.config.schema.trainer import AdamWConfig, CustomLoss, TrainerConfig
from tests.parity.knobs import keys_of
from tests.parity.meshes import NUM_LAYERS
from tests.tiny import make_model_folder

MODELS = ("qwen3", "llama")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 36, "num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 44},
    "llama": {"hidden_size": 32, "num_key_value_heads": 2, "intermediate_size": 40, "tie_word_embeddings": False},
}
"""Qwen3 has tied embeddings, norms of queries and keys, and sizes that few numbers divide: 36 rows are no eight equal
chunks, 44 no eight equal columns, 102 words no four equal parts."""
OPTIM = AdamWConfig(lr=3e-4, eps=1e-5)
"""Adam's first update is the sign of the gradient, and one sign in 30,000 that rounding turns would be 4 thousandths of
all that three steps change. With this eps a gradient that is next to nothing changes next to nothing."""
COLLECTIVE_TIMEOUT_S = 200
"""While a slot compiles its layers, on a loaded machine, the others wait for it."""

Memory = Literal["shadow", "streaming"]
"""How a resize uses memory (`trainer.resize.memory`)."""


def make_folders(root: Path) -> dict[str, Path]:
    shared = {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": 8}
    return {model: make_model_folder(root / model, model, **shared, **SHAPES[model]) for model in MODELS}


def settings_for(folder: Path, model: Mapping[str, str], memory: Memory = "shadow") -> dict[str, Any]:
    """A dumped `TrainerConfig`; `model` has keys of [trainer.model], and names of knobs. Sizes of axes are not among
    them: a trainer is given its layout."""
    sections = {
        "model": {"name": str(folder), **keys_of(model)},
        "resize": {"memory": memory},
        "loss": CustomLoss(import_path="tests.parity.recorded.recording_loss", needs_reference=True),
        "optim": OPTIM,
        "dist_timeout_seconds": COLLECTIVE_TIMEOUT_S,
    }
    return TrainerConfig.model_validate(sections).model_dump()
