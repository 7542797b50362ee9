"""What an optimizer keeps is what its description says, and what is planned and built follows the description."""

import pytest
import torch
from torch import nn

from ductile.config.schema.optimizer_state import OptimizerTensor, Supported, optimizer_state
from ductile.config.schema.trainer import AdamWConfig, SGDConfig, TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.model.spec import ModelSpec
from ductile.trainer import state as state_module
from ductile.trainer.optimizer import make_optimizer, set_num_updates
from ductile.trainer.state import StatePlans

SPEC = ModelSpec("llama", 30, 16, 24, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
MADE_UP = (
    OptimizerTensor("low", "int8"),
    OptimizerTensor("master", "float32"),
    OptimizerTensor("count", "int64", "scalar"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config", [AdamWConfig(), SGDConfig(), SGDConfig(momentum=0.9)], ids=["adamw", "sgd", "momentum"]
)
def test_torch_keeps_what_is_described(config: Supported, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(3, 2, dtype=dtype))
    described = {"w": optimizer_state(config, "w", str(dtype).removeprefix("torch."))}
    optimizer = make_optimizer(config, described, {"w": parameter})
    made = kept_of(optimizer, parameter)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    expected = {kept.name: (f"torch.{kept.dtype}", () if kept.layout == "scalar" else (3, 2)) for kept in described["w"]}
    assert made == expected == kept_of(optimizer, parameter), "from the start, and after a step"


def kept_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors = {name: value for name, value in optimizer.state[parameter].items() if value is not None}
    return {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_a_made_up_description_is_built_planned_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    at = {"low/w": torch.full((6,), 7, dtype=torch.int8), "master/w": torch.full((6,), 0.5)}
    optimizer = make_optimizer(SGDConfig(), {"w": MADE_UP}, {"w": parameter}, at)
    set_num_updates(optimizer, {"w": MADE_UP}, {"w": parameter}, 4)
    kept = optimizer.state[parameter]
    assert (kept["low"].tolist(), kept["master"].tolist()) == ([[7, 7]] * 3, [[0.5, 0.5]] * 3)
    assert (kept["count"], kept["count"].dtype, at) == (4, torch.int64, {})

    monkeypatch.setattr(state_module, "optimizer_state", lambda config, parameter, dtype: MADE_UP)
    layout = StatePlans(SPEC, TrainerConfig()).layout(ParallelLayout.of((0, 1)), with_gradient=False)
    kinds = {tensor.name.partition("/")[0]: tensor.dtype for tensor in layout}
    assert kinds == {"model": "float32", "low": "int8", "master": "float32"}
    assert layout.buffer_sizes(1)["low/embed.weight"] == ("int8", 15 * 16)
