"""Layers that multiply by 8 bits: which do, where they cannot, and how far a step is from one without."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ductile.config.schema.trainer import SFTLoss, TrainerConfig
from ductile.core.batch.loss_aggregation import loss_denominator
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.model.lora import LoraSpec
from ductile.fabric.groups import Groups
from ductile.kernels import float8 as kernel
from ductile.model.checkpoint import load_model
from ductile.model.linear import Linear
from ductile.parallel import float8
from ductile.parallel.parallel_context import ParallelContext
from ductile.trainer.trainer import Trainer
from tests.ranks import run_ranks
from tests.tiny import make_model_folder
from tests.trainer.naive import make_samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=96, head_dim=16)


def test_layers_multiply_by_8_bits_and_the_head_does_not(folder: Path) -> None:
    model = load_model(folder, lora=LoraSpec(4, 8.0, ("q_proj",)))
    float8.apply(model)
    linears = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    assert {name for name in linears if model.get_submodule(name).product is kernel.linear} == {
        name for name in linears if name.startswith("layers.")
    }


def test_a_part_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    model = load_model(make_model_folder(tmp_path, hidden_size=32, intermediate_size=40))
    with pytest.raises(
        ValueError, match=r"layers.0.mlp.gate_up_proj has 32 and 80|layers.0.mlp.down_proj has 40 and 32"
    ):
        float8.apply(model)


def settings_for(folder: Path, **model: Any) -> dict[str, Any]:
    sections = {"model": {"name": str(folder), "compute_dtype": "bfloat16", **model}, "loss": SFTLoss()}
    return TrainerConfig.model_validate(sections).model_dump()


def step(groups: Groups, members: tuple[int, ...], settings: dict[str, Any], tp: int) -> tuple[float, float]:
    """Loss and norm of the gradient."""
    with patch.object(kernel, "check"):  # the arithmetic is a GPU's
        config = TrainerConfig.model_validate(settings)
        trainer = Trainer(config, ParallelContext(groups, ParallelLayout.of(members, tp=tp)))
    samples = make_samples((20, 3, 9))
    trainer.forward_backward(pack(samples, 1, 40)[0])
    report = trainer.optim_step(loss_denominator(samples))
    return report.loss, report.grad_norm


def test_a_step_is_near_that_of_16_bits_also_with_tp(folder: Path) -> None:
    ((loss, norm),) = run_ranks(1, step, settings_for(folder), 1)
    for num_slots, spelling in ((1, {"fp8": True}), (2, {"quantization": {"type": "fp8"}})):
        for found in run_ranks(num_slots, step, settings_for(folder, **spelling), num_slots):
            assert found[0] == pytest.approx(loss, rel=0.03)
            assert found[0] != loss
            assert found[1] == pytest.approx(norm, rel=0.1)


def test_a_slot_without_such_a_gpu_refuses_to_start(folder: Path) -> None:
    sentence = (
        r"trainer.model.fp8 cannot be had on this slot: it needs an NVIDIA GPU of compute capability 8.9 or later"
    )
    with pytest.raises(ValueError, match=sentence):
        kernel.check(torch.bfloat16, torch.device("cpu"))
