"""What an optimizer keeps is what its description says, and what is planned and built follows the description."""

import pytest
import torch
from torch import nn

from ductile.config.schema.optimizer_state import OptimizerTensor, optimizer_state
from ductile.config.schema.trainer import AdamWConfig, OptimConfig, SGDConfig, TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.model.spec import ModelSpec
from ductile.parallel.host_memory import is_host
from ductile.trainer import optimizer as optimizer_module
from ductile.trainer import state as state_module
from ductile.trainer.optimizer import Optimizer
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
def test_torch_keeps_what_is_described(config: OptimConfig, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(3, 2, dtype=dtype))
    described = {"w": optimizer_state(config, "w", str(dtype).removeprefix("torch."))}
    optimizer = Optimizer(config, described, {"w": parameter})
    made = kept_of(optimizer)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step(lr=0.1)
    expected = {
        kept.name: (f"torch.{kept.dtype}", () if kept.layout == "scalar" else (3, 2)) for kept in described["w"]
    }
    assert made == expected == kept_of(optimizer), "from the start, and after a step"


def kept_of(optimizer: Optimizer) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in optimizer.state["w"].items()}


@pytest.mark.parametrize(
    "config", [AdamWConfig(), SGDConfig(), SGDConfig(momentum=0.9)], ids=["adamw", "sgd", "momentum"]
)
def test_offloaded_state_waits_in_host_memory_and_changes_no_bit(
    config: OptimConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_module, "BUCKET_BYTES", 2 * 4 * 50)  # two moments of 50 numbers
    torch.manual_seed(3)
    sizes = {"a": 40, "b": 10, "c": 30, "d": 90, "e": 5}
    weights = {name: torch.randn(size) for name, size in sizes.items()}
    made: list[Optimizer] = []
    for is_offloaded in (False, True):
        parameters = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
        described = {name: optimizer_state(config, name, "float32", is_offloaded) for name in parameters}
        made.append(optimizer := Optimizer(config, described, parameters))
        for step in range(3):
            for name, parameter in parameters.items():
                parameter.grad = weights[name] * (step - 1)
            optimizer.step(lr=0.1)
        weights_after = {name: parameter.detach() for name, parameter in parameters.items()}
        if not is_offloaded:
            plain = weights_after
    assert all(torch.equal(plain[name], weights_after[name]) for name in sizes)
    on_device, in_host_memory = made
    for name, state in in_host_memory.state.items():
        for kept, tensor in state.items():
            assert torch.equal(tensor, on_device.state[name][kept]), (name, kept)
            assert is_host(tensor) == (kept != "step")


def test_a_made_up_description_is_built_planned_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    at = {"low/w": torch.full((6,), 7, dtype=torch.int8), "master/w": torch.full((6,), 0.5)}
    optimizer = Optimizer(SGDConfig(), {"w": MADE_UP}, {"w": parameter}, at)
    optimizer.set_num_updates(4)
    kept = optimizer.state["w"]
    assert (kept["low"].tolist(), kept["master"].tolist()) == ([[7, 7]] * 3, [[0.5, 0.5]] * 3)
    assert (kept["count"], kept["count"].dtype, at) == (4, torch.int64, {})

    monkeypatch.setattr(state_module, "optimizer_state", lambda config, parameter, dtype, **_: MADE_UP)
    layout = StatePlans(SPEC, TrainerConfig()).layout(ParallelLayout.of((0, 1)), with_gradient=False)
    kinds = {tensor.name.partition("/")[0]: tensor.dtype for tensor in layout}
    assert kinds == {"model": "float32", "low": "int8", "master": "float32"}
    assert layout.buffer_sizes(1)["low/embed.weight"] == ("int8", 15 * 16)
