"""Several optimizer steps against the naive loop; what a step reports; what it refuses."""

from collections.abc import Iterator
from math import isfinite
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from ductile.config.checks.weight_headers import ModelFolderError
from ductile.config.schema.trainer import (
    AdamWConfig,
    CustomLoss,
    DefaultLoss,
    GRPOLoss,
    OptimConfig,
    SFTLoss,
    SGDConfig,
    TrainerConfig,
)
from ductile.core.batch.loss_aggregation import loss_denominator
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.model.flops import training_flops
from ductile.core.layout.model.peak import Peak
from ductile.fabric.groups import Groups
from ductile.model.packed import PackedSamples
from ductile.parallel.parallel_context import ParallelContext
from ductile.records import MicroBatch, Sample
from ductile.trainer import trainer as trainer_module
from ductile.trainer.loss import LossInputs, LossOutputs
from ductile.trainer.trainer import Trainer
from tests.ranks import run_ranks
from tests.tiny import make_model_folder
from tests.trainer.naive import NaiveTrainer, make_samples

LENGTHS = ((20, 3, 9), (31, 8), (17, 5, 2, 26))
"""Of the samples of three optimizer steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def alone() -> Iterator[ParallelContext]:
    groups = Groups(0, 1000, "cpu", HashStore(), 20.0)
    yield ParallelContext(groups, ParallelLayout.of((0,)))
    groups.destroy()


def config_for(folder: Path, **sections: object) -> TrainerConfig:
    return TrainerConfig.model_validate({"model": {"name": str(folder)}, **sections})


def train(trainer: Trainer, lengths: tuple[tuple[int, ...], ...], rank: int = 0, num_ranks: int = 1) -> list[float]:
    losses = []
    for step, of_step in enumerate(lengths):
        samples = make_samples(of_step, seed=step)
        trainer.score(samples)  # a forward pass without a backward one leaves no trace
        trainer.forward_backward(pack(samples, num_ranks, 40)[rank])
        losses.append(trainer.optim_step(loss_denominator(samples)).loss)
    return losses


def train_on_ranks(groups: Groups, members: tuple[int, ...], settings: dict) -> tuple[list[float], dict[str, list]]:
    context = ParallelContext(groups, ParallelLayout.of(members))
    trainer = Trainer(TrainerConfig.model_validate(settings), context)
    losses = train(trainer, LENGTHS, context.data_parallel_rank, len(members))
    trainer.score(make_samples(LENGTHS[0]))
    assert all(name in trainer.optimizer.state for name, _ in trainer.model.named_parameters())
    return losses, {name: tensor.tolist() for name, tensor in trainer.publish_weights()}


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    ("optim", "theirs", "options"),
    [
        (
            AdamWConfig(lr=1e-2, betas1=0.8, betas2=0.9, eps=1e-4, weight_decay=0.1, max_norm=0.5),
            torch.optim.AdamW,
            {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1},
        ),
        (
            SGDConfig(lr=1e-1, weight_decay=0.1, momentum=0.9, nesterov=True, max_norm=None),
            torch.optim.SGD,
            {"lr": 1e-1, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
        ),
    ],
    ids=["adamw", "sgd"],
)
def test_three_steps_are_those_of_torch_on_one_device(
    folder: Path, optim: OptimConfig, theirs: type[torch.optim.Optimizer], options: dict, num_ranks: int
) -> None:
    naive = NaiveTrainer(folder, GRPOLoss(), theirs, **options)
    expected = [naive.step(make_samples(n, seed=step), optim.max_norm) for step, n in enumerate(LENGTHS)]
    settings = config_for(folder, optim=optim, loss=GRPOLoss()).model_dump()
    for losses, tensors in run_ranks(num_ranks, train_on_ranks, settings):
        assert losses == pytest.approx(expected, rel=1e-4)
        for name, parameter in naive.model.named_parameters():
            torch.testing.assert_close(torch.tensor(tensors[name]), parameter.detach(), rtol=1e-4, atol=1e-5)


def test_what_a_step_reports(folder: Path, alone: ParallelContext) -> None:
    trainer = Trainer(config_for(folder, optim=SGDConfig(lr=0.5), loss=DefaultLoss()), alone)
    samples = make_samples((10, 12))
    num_tokens = trainer.forward_backward([MicroBatch(tuple(samples)), MicroBatch(())])
    report = trainer.optim_step(float(num_tokens))
    assert report.step == trainer.step == 1
    assert report.num_tokens == num_tokens == sum(sum(sample.loss_mask) for sample in samples)
    assert report.lr == 0.5
    assert set(report.metrics) == {"masked_fraction", "mismatch_kl", "entropy", "skipped"}
    assert 4.0 < report.metrics["entropy"] < 5.0  # a random model's: close to log(102)
    assert report.metrics["skipped"] == 0.0
    expected = PackedSamples.of(samples).work  # the empty micro-batch has a made-up token, which does not count
    assert report.flops == training_flops(trainer.spec, expected)
    assert report.peak_flops_per_s is None, "nobody has measured this CPU"


def test_a_device_that_ranks_share_counts_once(
    folder: Path, alone: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "peak_of", lambda device, arithmetic: Peak(1e12, "known"))
    trainer = Trainer(config_for(folder, loss=DefaultLoss()), alone)
    for num_on_device, expected in ((1, 1e12), (4, 0.25e12)):
        monkeypatch.setattr(alone, "num_on_device", num_on_device)
        num_tokens = trainer.forward_backward([MicroBatch(tuple(make_samples((10, 12))))])
        assert trainer.optim_step(float(num_tokens)).peak_flops_per_s == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_micro_step_on_a_gpu_has_ended_when_it_returns(folder: Path) -> None:
    groups = Groups(0, 1000, "cuda:0", HashStore(), 20.0)
    trainer = Trainer(config_for(folder, loss=SFTLoss()), ParallelContext(groups, ParallelLayout.of((0,))), "cuda:0")
    for _ in range(3):
        trainer.forward_backward([MicroBatch(tuple(make_samples((30, 30, 30))))])
        assert torch.cuda.current_stream().query(), "nothing is left to do"
    groups.destroy()


def test_the_schedule_sets_the_learning_rate(folder: Path, alone: ParallelContext) -> None:
    scheduler = {"type": "linear", "warmup_steps": 1, "decay_steps": 2}
    config = config_for(folder, optim=SGDConfig(lr=1.0), loss=SFTLoss(), scheduler=scheduler, max_steps=4)
    trainer = Trainer(config, alone)
    lrs = []
    for _ in range(4):
        trainer.forward_backward([MicroBatch(tuple(make_samples((6,))))])
        lrs.append(trainer.optim_step(1.0).lr)
    assert lrs == [0.5, 1.0, 1.0, 0.5]


def test_a_batch_that_taught_nothing_counts_for_the_schedule_and_moves_no_weight(
    folder: Path, alone: ParallelContext
) -> None:
    scheduler = {"type": "linear", "warmup_steps": 0, "decay_steps": 4}
    config = config_for(folder, optim=SGDConfig(lr=1.0), loss=SFTLoss(), scheduler=scheduler, max_steps=4)
    trainer = Trainer(config, alone)
    before = {name: tensor.clone() for name, tensor in trainer.publish_weights()}
    assert [trainer.optim_step(0.0).lr for _ in range(3)] == [1.0, 0.75, 0.5]
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.publish_weights())
    assert trainer.num_updates == 0
    trainer.forward_backward([MicroBatch(tuple(make_samples((6,))))])
    with pytest.raises(ValueError, match="is 0, and there is a gradient"):
        trainer.optim_step(0.0)
    assert trainer.optim_step(1.0).lr == 0.25


def test_a_gradient_that_is_not_finite_changes_nothing(folder: Path, alone: ParallelContext) -> None:
    trainer = Trainer(config_for(folder, loss=DefaultLoss(), optim=AdamWConfig(lr=1e-2)), alone)
    before = {name: tensor.clone() for name, tensor in trainer.publish_weights()}
    (sample,) = make_samples((6,))
    poisoned = Sample(
        sample.token_ids,
        sample.loss_mask,
        sample.rollout_logprobs,
        advantages=tuple(3e38 * (a != 0) for a in sample.advantages),
    )
    trainer.forward_backward([MicroBatch((poisoned,))])
    report = trainer.optim_step(1.0)
    assert report.metrics["skipped"] == 1.0
    assert (trainer.step, trainer.num_updates) == (1, 0)
    for name, tensor in trainer.publish_weights():
        assert torch.equal(tensor, before[name])
    trainer.forward_backward([MicroBatch((sample,))])
    assert trainer.optim_step(1.0).metrics["skipped"] == 0.0


def test_log_probs_are_those_of_the_sampling_temperature(folder: Path, alone: ParallelContext) -> None:
    """The entropy of hot answers is higher: logits were divided by their temperature."""
    entropies = []
    for temperature in (0.05, 1.0):
        trainer = Trainer(config_for(folder, loss=SFTLoss()), alone)
        trainer.forward_backward([MicroBatch(tuple(make_samples((30,), temperatures=(temperature,))))])
        entropies.append(trainer.optim_step(1.0).metrics["entropy"])
    assert entropies[0] < entropies[1] - 0.5


def awkward_loss(inputs: LossInputs) -> LossOutputs:
    """Not a number for a made-up token, and metrics with the names of the trainer's own sums."""
    advantages = inputs.advantages / inputs.advantages.abs().sum()
    return LossOutputs(-advantages * inputs.logprobs, {"loss": advantages, "num_tokens": advantages * 0 + 7})


def test_a_custom_loss_cannot_spoil_the_sums(folder: Path, alone: ParallelContext) -> None:
    loss = CustomLoss(import_path=f"{__name__}.awkward_loss")
    trainer = Trainer(config_for(folder, loss=loss), alone)
    num_tokens = trainer.forward_backward([MicroBatch(()), MicroBatch(tuple(make_samples((9,)))), MicroBatch(())])
    report = trainer.optim_step(1.0)
    assert isfinite(report.loss)
    assert report.num_tokens == num_tokens
    assert report.metrics["num_tokens"] == 7.0
    assert report.metrics["skipped"] == 0.0


def test_a_forgotten_gradient_leaves_nothing_behind(folder: Path, alone: ParallelContext) -> None:
    reports = []
    for wasted in ((), tuple(make_samples((8, 8), seed=5))):
        trainer = Trainer(config_for(folder, loss=SFTLoss()), alone)
        trainer.forward_backward([MicroBatch(wasted)])
        trainer.forget_gradient()
        trainer.forward_backward([MicroBatch(tuple(make_samples((6,))))])
        reports.append(trainer.optim_step(3.0))
    assert reports[0] == reports[1]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_loss_denominator_that_is_none_is_refused(folder: Path, alone: ParallelContext, bad: float) -> None:
    trainer = Trainer(config_for(folder, loss=SFTLoss()), alone)
    trainer.forward_backward([MicroBatch(tuple(make_samples((6,))))])
    with pytest.raises(ValueError, match="the loss denominator of an optimizer step is"):
        trainer.optim_step(bad)


def test_a_step_without_a_gradient_is_refused(folder: Path, alone: ParallelContext) -> None:
    with pytest.raises(ValueError, match="without a forward_backward"):
        Trainer(config_for(folder), alone).optim_step(1.0)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"scheduler": {"type": "cosine"}}, r"scheduler\.type = 'cosine' needs max_steps"),
    ],
)
def test_a_config_that_cannot_be_had(folder: Path, alone: ParallelContext, sections: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(config_for(folder, **sections), alone)


@pytest.mark.parametrize("attn", ["flash_attention_2", "fa3", "fa4"])
def test_attention_of_a_gpu_is_refused_on_a_cpu(folder: Path, alone: ParallelContext, attn: str) -> None:
    with pytest.raises(ValueError, match=f'trainer.model.attn = "{attn}" cannot be had on this slot: .* for NVIDIA'):
        Trainer(config_for(folder, model={"name": str(folder), "attn": attn}), alone)


def test_a_model_is_needed(alone: ParallelContext) -> None:
    with pytest.raises(ModelFolderError, match=r"trainer\.model\.name is not set"):
        Trainer(TrainerConfig(), alone)


def test_debug_options_shape_the_model(folder: Path, alone: ParallelContext) -> None:
    debug = {"name": str(folder), "debug": {"num_layers": 1, "random_init": True}}
    one, same = (Trainer(TrainerConfig.model_validate({"model": debug, "seed": 3}), alone) for _ in range(2))
    other = Trainer(TrainerConfig.model_validate({"model": debug, "seed": 4}), alone)
    assert one.spec.num_layers == 1
    for (name, a), (_, b), (_, c) in zip(
        one.publish_weights(), same.publish_weights(), other.publish_weights(), strict=True
    ):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == name.endswith(("norm.weight", "bias"))
