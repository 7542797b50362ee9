"""Layers that torch compiles compute what they do uncompiled, and are compiled a bounded number of times, whatever
sizes their micro-batches have, and whichever layouts the trainer comes to."""

import io
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ductile.config.schema.model import ActivationCheckpointing, ActivationOffloading, CompileConfig
from ductile.config.schema.trainer import AdamWConfig, SFTLoss, TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.model.spec import ModelSpec
from ductile.kernels import dispatch
from ductile.model.checkpoint import read_spec
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel import activation_checkpointing, compilation
from ductile.parallel.activation_offloading import ActivationOffload
from ductile.records import StepReport
from tests.parity.measured import PARAMETERS, whole_state
from tests.ranks import run_alone
from tests.tiny import make_model_folder
from tests.trainer.fleet import Fleet
from tests.trainer.naive import make_samples

DP, TP = ParallelLayout.of((0, 1)), ParallelLayout.of((0, 1), tp=2)
NUM_STEPS = 20
"""Optimizer steps on uneven batches before the first resize."""
STEPS_OF_LAYOUT = 2
"""Those in each further layout."""
MOST_GRAPHS, MOST_RECOMPILES = 8, 4
"""What both slots may compile in the first `NUM_STEPS` steps: four pieces of a layer each, and some of them again."""
SPEC = ModelSpec("qwen3", 102, 16, 24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, qk_norm=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "model", "qwen3", num_hidden_layers=3)


def settings_for(folder: Path, compile: dict[str, Any] | None) -> dict[str, Any]:
    sections = {
        "model": {"name": str(folder), "compile": compile},
        "loss": SFTLoss(),
        "optim": AdamWConfig(lr=1e-4, eps=1e-5),  # a gradient that is next to nothing changes next to nothing
    }
    return TrainerConfig.model_validate(sections).model_dump()


def train(fleet: Fleet, step: int, after: ParallelLayout | None = None) -> StepReport:
    """Run three micro-steps of samples of any length, of which a rank may have none; before the last of them the
    trainer is resized to another layout, if there is one."""
    sizes = random.Random(step)
    samples = make_samples([sizes.randint(2, 60) for _ in range(5)], seed=step)
    for index, of_micro_step in enumerate((samples[:3], samples[3:4], samples[4:])):
        if index == 2 and after is not None:
            fleet.resize(after)
        fleet.forward_backward(of_micro_step)
    return fleet.optim_step(float(sum(map(len, samples))))


def travel(settings: dict[str, Any], folder: Path) -> tuple[list[StepReport], dict[str, np.ndarray]]:
    """Return the reports of a trainer that goes from dp 2 to tp 2 and back, in the middle of a step each time, and its
    weights in the end."""
    with Fleet(settings, range(2), deadline_s=200.0) as fleet:
        fleet.assign_in(DP)
        reports = [train(fleet, step) for step in range(NUM_STEPS)]
        for after in (TP, DP):
            reports.append(train(fleet, len(reports), after))
            reports += [train(fleet, len(reports) + more) for more in range(STEPS_OF_LAYOUT)]
        return reports, whole_state(fleet, read_spec(folder), PARAMETERS)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_a_trainer_on_two_meshes_and_through_resizes_is_the_uncompiled_one(
    folder: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, uncompiled = travel(settings_for(folder, None), folder)
    reports, compiled = travel(settings_for(folder, {"backend": backend}), folder)
    for ours, theirs in zip(reports, expected, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    assert max(np.abs(compiled[name] - uncompiled[name]).max() for name in uncompiled) < 1e-5
    graphs, recompiles = (
        [int(each.metrics[f"compile/{what}"]) for each in reports] for what in ("graphs", "recompiles")
    )
    with capsys.disabled():
        print(
            f"\n{backend}: {NUM_STEPS} uneven steps on two slots compile {sum(graphs[:NUM_STEPS])} graphs, and "
            f"{sum(recompiles[:NUM_STEPS])} of them again; by step, through tp 2 and back: {graphs}, {recompiles}"
        )
    assert 0 < sum(graphs[:NUM_STEPS]) <= MOST_GRAPHS + MOST_RECOMPILES
    assert sum(recompiles[:NUM_STEPS]) <= MOST_RECOMPILES
    assert graphs[-STEPS_OF_LAYOUT:] == [0] * STEPS_OF_LAYOUT, "what was compiled for a layout is found again"


def gradients(*apply: Any) -> list[Tensor]:
    """Return the gradients of all weights of a model, to which each of these has been applied."""
    torch.manual_seed(7)
    model = Transformer(SPEC)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for each in apply:
        each(model)
    for lengths in ((31, 7, 18), (12, 40)):
        logprobs, _ = PackedSamples.of(make_samples(lengths, seed=1)).score(model)
        logprobs.sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def compile(model: Transformer, backend: str = "aot_eager") -> None:
    compilation.apply(model, CompileConfig(backend=backend))


def checkpoint(model: Transformer) -> None:
    activation_checkpointing.apply(model, ActivationCheckpointing())


def offload(model: Transformer) -> None:
    ActivationOffload.of(ActivationOffloading(), torch.device("cpu")).apply(model)


@pytest.mark.slow
def test_generated_code_computes_the_same() -> None:
    torch.testing.assert_close(gradients(partial(compile, backend="inductor")), gradients(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("around", [(), (checkpoint,), (offload,), (checkpoint, offload)], ids=len)
def test_checkpointing_and_offloading_go_around_it(around: tuple[Any, ...]) -> None:
    compilation.why_no_compiler.cache_clear()  # so that the first layer asks, inside of all that is around it
    torch.testing.assert_close(gradients(compile, *around), gradients(), atol=1e-5, rtol=1e-5)


def test_a_piece_that_cannot_be_compiled_runs_as_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("an operator\nand where it is")

    torch._dynamo.reset()
    compilation.why_no_compiler("aot_eager", torch.device("cpu"))
    monkeypatch.setattr(compilation, "lookup_backend", lambda name: fail)
    dispatch.tell.cache_clear()
    torch.testing.assert_close(gradients(compile), gradients(), atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()
    assert capsys.readouterr().err == "a piece of each layer runs uncompiled: NotImplementedError: an operator\n"


class Scaled(nn.Module):
    """A layer with two numbers, either of which may be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.ones(())) for _ in range(2))

    def forward(self, x: Tensor, *others: object) -> Tensor:
        return x * self.one + self.other


def in_a_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def test_a_layer_may_have_many_variants_whichever_thread_made_the_model() -> None:
    """A resize makes it in a thread of its own, and torch's settings are of a thread."""
    model = SimpleNamespace(layers=nn.ModuleDict({"0": (layer := Scaled())}))
    in_a_thread(partial(compile, model))  # pyright: ignore[reportArgumentType]

    def run() -> list[int]:
        compilation.COUNTERS.take()
        graphs: list[int] = []
        for one, other, num_dims in product((True, False), (True, False), (1, 2, 3)):
            layer.one.requires_grad_(one)
            layer.other.requires_grad_(other)
            layer(torch.ones((3,) * num_dims), *[torch.ones(1)] * 2, 0, None)
            graphs.append(compilation.COUNTERS.take()["compile/graphs"])
        return graphs

    assert in_a_thread(run) == [1] * 12


def without_a_compiler() -> tuple[bool, int, str]:
    import torch._inductor.config as inductor_config

    inductor_config.cpp.cxx = (None, "/nowhere/g++")
    inductor_config.force_disable_caches = True
    with redirect_stderr(io.StringIO()) as told:
        ours, expected = gradients(partial(compile, backend="inductor")), gradients()
    return all(map(torch.equal, ours, expected)), compilation.COUNTERS.num_graphs, told.getvalue()


def test_without_a_compiler_layers_run_as_they_do() -> None:
    is_equal, num_graphs, told = run_alone(without_a_compiler)
    assert is_equal
    assert num_graphs == 0
    assert "trainer.model.compile has no effect on this slot: " in told
    assert "InvalidCxxCompiler" in told
