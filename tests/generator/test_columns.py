"""Weights that lie by columns are the same weights, before and after an update."""

import torch
from torch import nn

from ductile.config.schema.inference import InferenceConfig
from ductile.core.layout.model.spec import ModelSpec
from ductile.generator.engine.engine import Engine
from ductile.generator.engine.weight_columns import empty_by_columns, lay_by_columns
from ductile.model.transformer import Transformer
from ductile.weights.overwrite import overwrite

SPEC = ModelSpec("qwen3", 11, 32, 48, 2, 4, 2, 8)


def test_values_stay_and_memory_turns() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2, bias=False))
    x = torch.randn(4, 3)
    before, expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}, model(x)
    lay_by_columns(model)
    assert model[0].weight.stride() == (1, 5)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(model(x), expected)


def test_what_is_overwritten_stays_as_it_lies() -> None:
    for parameter in (torch.zeros(5, 3), torch.zeros(3, 5).t(), torch.zeros(7)):
        strides, values = parameter.stride(), torch.randn(parameter.shape)
        overwrite(parameter, values)
        assert torch.equal(parameter, values)
        assert parameter.stride() == strides


def test_an_engine_has_what_it_was_given() -> None:
    torch.manual_seed(0)
    model = Transformer(SPEC)
    engine = Engine(model, InferenceConfig.model_validate({"num_blocks": 8}), (), lambda ids, special: "")
    assert not engine.model.layers["0"].mlp.down_proj.weight.is_contiguous()
    weights = {name: torch.randn(parameter.shape) for name, parameter in model.named_parameters()}
    engine.load_weights(weights, 1)
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_an_empty_model_lies_by_columns_and_its_engine_copies_nothing() -> None:
    model = empty_by_columns(SPEC, torch.bfloat16, "cpu")
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    engine = Engine(model, InferenceConfig.model_validate({"num_blocks": 8}), (), lambda ids, special: "")
    after = dict(engine.model.named_parameters())
    assert before == {name: parameter.data_ptr() for name, parameter in after.items()}
    assert {parameter.dtype for parameter in after.values()} == {torch.bfloat16}
    assert after["layers.0.mlp.down_proj.weight"].stride() == (1, SPEC.hidden_size)
