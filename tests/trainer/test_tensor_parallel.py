"""A trainer whose slots share every weight takes the steps of one that is alone, and gives the same weights away."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ductile.config.schema.trainer import AdamWConfig, GRPOLoss, TrainerConfig
from ductile.core.batch.loss_aggregation import loss_denominator, weigh
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric.groups import Groups
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.torch_pipelining import HAS_ZERO_BUBBLE
from ductile.records import StepReport
from ductile.trainer.checkpoint import load_state, save_state
from ductile.trainer.export import export_model
from ductile.trainer.state import named_state, parts_of
from ductile.trainer.trainer import Trainer
from tests.nightly import mostly_nightly
from tests.ranks import run_ranks
from tests.tiny import make_model_folder
from tests.trainer.fleet import Fleet
from tests.trainer.naive import make_samples

STEPS = ((20, 3, 9, 31, 2), (12,), (31, 8, 17, 5))
"""Lengths of the samples of each optimizer step. In the second one a data-parallel rank has none."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"tie_word_embeddings": False},
    "llama": {"attention_bias": True, "mlp_bias": True, "intermediate_size": 50},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {family: str(make_model_folder(root / family, family, **keys)) for family, keys in FAMILIES.items()}


def settings_for(folder: str, **model: object) -> dict[str, Any]:
    sections = {
        "model": {"name": folder, **model},
        "loss": GRPOLoss(kl_coef=0.1, clip_high=0.3),
        "optim": AdamWConfig(lr=1e-3),
    }
    return TrainerConfig.model_validate(sections).model_dump()


def trainer_of(groups: Groups, members: tuple[int, ...], settings: dict[str, Any], sizes: dict[str, int]) -> Trainer:
    context = ParallelContext(groups, ParallelLayout.of(members, **sizes))
    return Trainer(TrainerConfig.model_validate(settings), context)


def take_steps(trainer: Trainer) -> list[StepReport]:
    reports: list[StepReport] = []
    for number, lengths in enumerate(STEPS):
        samples = make_samples(lengths, seed=number, temperatures=(1.0, 0.6))
        parts = pack(weigh(samples, "token_mean"), trainer.context.layout.num_data_parallel, 34)
        mine = parts[trainer.context.data_parallel_rank]
        trainer.forward_backward(mine[:1])  # accumulated over several commands, too
        trainer.forward_backward(mine[1:])
        reports.append(trainer.optim_step(loss_denominator(samples, "token_mean")))
    return reports


def trains(
    groups: Groups, members: tuple[int, ...], settings: dict[str, Any], sizes: dict[str, int]
) -> tuple[list[StepReport], dict[str, Tensor]]:
    trainer = trainer_of(groups, members, settings, sizes)
    return take_steps(trainer), dict(trainer.export_weights(torch.float32))


@pytest.mark.parametrize(
    ("family", "num_slots", "sizes"),
    mostly_nightly(
        [
            ("qwen3", 2, {"tp": 2}),
            ("qwen3", 4, {"tp": 4}),
            ("qwen3", 4, {"tp": 2}),
            ("qwen2", 4, {"tp": 2, "dp_replicate": 2}),
            ("qwen2", 4, {"tp": 4}),
            ("llama", 4, {"tp": 2}),
            ("llama", 4, {"tp": 4}),
            ("qwen3", 4, {"pp": 2, "tp": 2}),
        ],
        ("llama", 4, {"tp": 2}),
        ("qwen3", 4, {"pp": 2, "tp": 2}),
    ),
)
def test_three_steps_are_those_of_one_slot(
    folders: dict[str, str], family: str, num_slots: int, sizes: dict[str, int]
) -> None:
    # Of the schedules zero_bubble asks most of the graph: gradients of weights are made after those of inputs.
    settings = settings_for(folders[family], pp_schedule="zero_bubble" if HAS_ZERO_BUBBLE else "1f1b")
    ((alone, expected),) = run_ranks(1, trains, settings, {})
    for reports, weights in run_ranks(num_slots, trains, settings, sizes):
        for ours, theirs in zip(reports, alone, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, abs=1e-4)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
            assert (ours.num_tokens, ours.flops) == (theirs.num_tokens, theirs.flops)
            assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-4)
        for name, values in expected.items():
            torch.testing.assert_close(weights[name], values, atol=2e-5, rtol=1e-4, msg=name)


def trains_on_a_gpu(groups: Groups, members: tuple[int, ...], settings: dict[str, Any]) -> list[StepReport]:
    on_gpu = Groups(groups.slot, 1, "cuda:0", groups._store, 60.0)
    context = ParallelContext(on_gpu, ParallelLayout.of(members, tp=len(members)))
    return take_steps(Trainer(TrainerConfig.model_validate(settings), context, "cuda:0"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tp", [2, 4])
def test_slots_that_share_a_gpu_take_the_same_steps(folders: dict[str, str], tp: int) -> None:
    settings = settings_for(folders["qwen3"], compute_dtype="float32") | {"matmul_precision": "highest"}
    ((alone, _),) = run_ranks(1, trains, settings, {})
    for reports in run_ranks(tp, trains_on_a_gpu, settings, timeout_s=60.0):
        assert [report.loss for report in reports] == pytest.approx([report.loss for report in alone], abs=1e-4)


def gives_away(
    groups: Groups,
    members: tuple[int, ...],
    settings: dict[str, Any],
    sizes: dict[str, int],
    source: str,
    target: str,
) -> tuple[dict[str, Tensor], bool]:
    """Load `source`, or take steps where there is none; save and export to `target`. All parameters, and whether what
    is published is the same in the type that is computed with."""
    trainer = trainer_of(groups, members, settings, sizes)
    if source:
        load_state(trainer, f"{source}.state")
    else:
        take_steps(trainer)
    save_state(trainer, f"{target}.state")
    export_model(trainer, target, "float32")
    whole, compute = dict(trainer.export_weights(torch.float32)), trainer.precision.compute
    published = {name: tensor.clone() for name, tensor in trainer.publish_weights()}
    return whole, all(torch.equal(published[name], tensor.to(compute)) for name, tensor in whole.items())


def state_of(groups: Groups, members: tuple[int, ...], settings: dict[str, Any], path: str) -> dict[str, Tensor]:
    trainer = trainer_of(groups, members, settings, {})
    load_state(trainer, f"{path}.state")
    return {name: tensor.clone() for name, tensor in parts_of(named_state(trainer)).items()}


@pytest.mark.parametrize(
    ("family", "compute"), mostly_nightly([("qwen3", "bfloat16"), ("llama", "float32")], ("qwen3", "bfloat16"))
)
def test_weights_go_from_any_layout_to_any_other(
    folders: dict[str, str], tmp_path: Path, family: str, compute: str
) -> None:
    settings = settings_for(folders[family], compute_dtype=compute)
    source, states, folder = "", [], {}
    first: dict[str, Tensor] = {}
    for number, (num_slots, sizes) in enumerate([(4, {"tp": 2}), (1, {}), (4, {"tp": 4}), (2, {"tp": 2})]):
        target = str(tmp_path / str(number))
        for whole, published_is_equal in run_ranks(num_slots, gives_away, settings, sizes, source, target):
            first = first or whole
            assert all(torch.equal(whole[name], tensor) for name, tensor in first.items()), "another after loading"
            assert published_is_equal
        states += run_ranks(1, state_of, settings, target)
        folder[number] = {path.name: path.read_bytes() for path in Path(target).iterdir()}
        source = target
    assert all(folder[number] == folder[0] for number in folder)
    for name, tensor in states[0].items():
        assert all(torch.equal(state[name], tensor) for state in states), name


def reports_of(settings: dict[str, Any], layouts: list[ParallelLayout]) -> list[StepReport]:
    """Two micro-steps an optimizer step. After each one, with a gradient, the trainer gets the next layout."""
    reports: list[StepReport] = []
    turn = iter(layouts)
    with Fleet(settings, range(4)) as fleet:
        fleet.layout = next(turn)
        fleet._assign(fleet.layout.slots, joining=False)
        for number in range(3):
            samples = make_samples((20, 3, 9, 31), seed=number)
            for part in (samples[:2], samples[2:]):
                fleet.forward_backward(part)
                if (after := next(turn, None)) is not None:
                    fleet.resize(after, release=False)
            reports.append(fleet.optim_step(float(sum(map(len, samples)))))
    return reports


@pytest.mark.parametrize("memory", mostly_nightly(["shadow", "streaming"], "streaming"))
def test_resized_in_the_middle_of_a_batch(folders: dict[str, str], memory: str) -> None:
    settings = settings_for(folders["qwen3"]) | {"resize": {"memory": memory}}
    layouts = [
        ParallelLayout.of((0, 1), tp=2),
        ParallelLayout.of((0, 1, 2, 3), tp=4),
        ParallelLayout.of((3, 1)),
        ParallelLayout.of((2, 3, 1, 0), tp=2),
        ParallelLayout.of((0, 3), tp=2),
        ParallelLayout.of((0, 1, 2, 3), tp=2, dp_replicate=2),
        ParallelLayout.of((1,)),
    ]
    alone = reports_of(settings, [ParallelLayout.of((0,))])
    for ours, theirs in zip(reports_of(settings, layouts), alone, strict=True):
        assert (ours.step, ours.num_tokens) == (theirs.step, theirs.num_tokens)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
