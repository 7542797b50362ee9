"""The table of names and shapes against the state dicts of `transformers`."""

import pytest
from transformers import AutoModelForCausalLM

from ductile.core.layout.model.parameters import parameters
from ductile.core.layout.model.spec import spec_from_hf
from tests.tiny import hf_config


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "head_dim": 20, "num_key_value_heads": 1}),
    ],
)
def test_parts_are_exactly_the_tensors_of_transformers(family: str, overrides: dict[str, object], tied: bool) -> None:
    config = hf_config(family, **overrides, tie_word_embeddings=tied)
    theirs = {
        name: tuple(tensor.shape) for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()
    }
    if tied:
        del theirs["lm_head.weight"]
    table = parameters(spec_from_hf(config.to_dict() | {"architectures": None}))
    parts = [part for parameter in table for part in parameter.parts]
    assert {part.name: part.shape for part in parts} == theirs
    assert len(parts) == len(theirs)
    assert len({parameter.name for parameter in table}) == len(table)


def test_fused_parameters_stack_their_parts() -> None:
    config = hf_config("qwen2", num_hidden_layers=1)
    table = {
        parameter.name: parameter for parameter in parameters(spec_from_hf(config.to_dict() | {"architectures": None}))
    }
    qkv = table["layers.0.attention.qkv_proj.weight"]
    assert (qkv.shape, qkv.rows) == ((64, 32), (32, 16, 16))
    assert [part.name.split(".")[-2] for part in qkv.parts] == ["q_proj", "k_proj", "v_proj"]
    bias = table["layers.0.attention.qkv_proj.bias"]
    assert (bias.shape, bias.rows) == ((64,), (32, 16, 16))
    gate_up = table["layers.0.mlp.gate_up_proj.weight"]
    assert (gate_up.shape, gate_up.rows) == ((96, 32), (48, 48))
