"""Rotary angles against those of `transformers`, and the property that makes them positions."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ductile.core.layout.model.spec import spec_from_hf
from ductile.kernels.plain import rotate
from ductile.model.rope import Rope, frequencies
from tests.tiny import hf_config

LLAMA31 = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(rope: dict[str, Any]) -> LlamaConfig:
    return hf_config("llama", head_dim=128, rope_parameters=rope)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 10000.0, "rope_type": "default"},
        {"rope_theta": 1e6, "rope_type": "default"},
        {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0},
        LLAMA31,
        LLAMA31 | {"factor": 32.0, "high_freq_factor": 2.0, "original_max_position_embeddings": 512},
    ],
)
def test_frequencies_equal_those_of_transformers(rope: dict[str, Any]) -> None:
    theirs = LlamaRotaryEmbedding(config(rope)).inv_freq
    ours = frequencies(spec_from_hf(config(rope).to_dict() | {"architectures": None}))
    torch.testing.assert_close(ours, theirs, atol=0, rtol=1e-6)


def test_scores_depend_on_distance_only() -> None:
    rope = Rope(spec_from_hf(config(LLAMA31).to_dict() | {"architectures": None}))
    q, k = torch.randn(2, 1, 1, 128, generator=torch.Generator().manual_seed(0))

    def score(at: int, of: int) -> float:
        return float((rotate(q, *rope(torch.tensor([at]))) * rotate(k, *rope(torch.tensor([of])))).sum())

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-3)
    assert score(7, 3) != pytest.approx(score(3, 7), abs=1e-2)
    assert score(5, 5) == pytest.approx(float((q * k).sum()), abs=1e-4)
