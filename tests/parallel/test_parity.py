"""FSDP2 and HSDP on any number of ranks compute what one plain module computes: loss, norm, every gradient."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FSDPModule

from ductile.config.schema.trainer import GRPOLoss, TrainerConfig
from ductile.core.batch.loss_aggregation import LossAggregation, loss_denominator, weigh
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric.groups import Groups
from ductile.parallel.gathered import full
from ductile.parallel.parallel_context import ParallelContext
from ductile.records import Sample
from ductile.trainer.trainer import Trainer
from tests.nightly import mostly_nightly
from tests.ranks import run_alone, run_ranks
from tests.tiny import make_model_folder
from tests.trainer.naive import NaiveTrainer, make_samples

LOSS = GRPOLoss(kl_coef=0.1, clip_high=0.3)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sizes that do not divide: on four ranks q_norm's two numbers leave two ranks without any."""
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": make_model_folder(root / "qwen3", "qwen3", head_dim=2, hidden_size=30, intermediate_size=50),
        "llama": make_model_folder(root / "llama", "llama", tie_word_embeddings=False),
    }


def gradients(
    groups: Groups,
    members: tuple[int, ...],
    settings: dict,
    samples: list[Sample],
    mode: LossAggregation,
    seq_len: int,
    replicas: int = 1,
) -> tuple[float, float, int, dict[str, list]]:
    context = ParallelContext(groups, ParallelLayout.of(members, dp_replicate=replicas))
    trainer = Trainer(TrainerConfig.model_validate(settings), context)
    mine = pack(weigh(samples, mode), len(members), seq_len)[context.data_parallel_rank]
    trainer.forward_backward(mine[:1])  # accumulated over several commands, too
    trainer.forward_backward(mine[1:])
    trainer.reduce_gradients()
    count = loss_denominator(samples, mode)
    found = {n: (full(p.grad) / count).tolist() for n, p in trainer.model.named_parameters()}
    report = trainer.optim_step(count)
    return report.loss, report.grad_norm, report.num_tokens, found


def settings_for(folder: Path, **model: object) -> dict:
    return TrainerConfig.model_validate({"model": {"name": str(folder), **model}, "loss": LOSS}).model_dump()


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)).item()


@pytest.mark.parametrize(
    ("num_ranks", "replicas"),
    mostly_nightly([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (6, 2), (6, 3), (5, 5)], (4, 1)),
)
@pytest.mark.parametrize(
    ("family", "lengths", "mode", "options"),
    [
        ("qwen3", (20, 3, 9, 31, 8, 17, 5, 2, 26), "token_mean", {}),
        ("llama", (12, 30, 7), "seq_mean_token_mean", {"reshard_after_forward": False}),
        ("qwen3", (20, 3, 9, 31, 8, 17, 5, 2, 26), "token_mean", {"reduce_every": "step"}),
    ],
    ids=["nine samples", "three samples: a rank of four has none", "summed once a step"],
)
def test_parity_with_one_device(
    folders: dict[str, Path],
    family: str,
    lengths: tuple[int, ...],
    mode: LossAggregation,
    options: dict,
    num_ranks: int,
    replicas: int,
) -> None:
    samples = make_samples(lengths, temperatures=(1.0, 0.6))
    naive = NaiveTrainer(folders[family], LOSS, torch.optim.SGD)
    loss, grad_norm = naive.gradients(samples, mode)
    settings = settings_for(folders[family], **options)
    for result in run_ranks(num_ranks, gradients, settings, samples, mode, 34, replicas):
        assert result[0] == pytest.approx(loss, rel=TOLERANCE)
        assert result[1] == pytest.approx(grad_norm, rel=TOLERANCE)
        assert result[2] == sum(sum(sample.loss_mask) for sample in samples)
        errors = {n: relative(torch.tensor(result[3][n]), p.grad) for n, p in naive.model.named_parameters()}
        assert max(errors.values()) < TOLERANCE, errors


def test_reduced_precision_stays_near(folders: dict[str, Path]) -> None:
    samples = make_samples((20, 3, 9, 31))
    loss, grad_norm = NaiveTrainer(folders["llama"], LOSS, torch.optim.SGD).gradients(samples)
    settings = settings_for(folders["llama"], compute_dtype="bfloat16")
    for result in run_ranks(2, gradients, settings, samples, "token_mean", 34):
        assert result[0] == pytest.approx(loss, rel=0.02)
        assert result[1] == pytest.approx(grad_norm, rel=0.05)
        assert result[1] != grad_norm


def loss_and_norm_on_a_gpu(settings: dict, samples: list[Sample]) -> tuple[float, float]:
    groups = Groups(0, 0, "cuda:0", HashStore(), 60.0)
    trainer = Trainer(
        TrainerConfig.model_validate(settings), ParallelContext(groups, ParallelLayout.of((0,))), "cuda:0"
    )
    for micro_batch in pack(samples, 1, 34)[0]:
        trainer.forward_backward([micro_batch])
    report = trainer.optim_step(loss_denominator(samples))
    return report.loss, report.grad_norm


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("compute_dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_a_gpu_computes_the_same(folders: dict[str, Path], compute_dtype: str, tolerance: float) -> None:
    samples = make_samples((20, 3, 9, 31))
    expected = NaiveTrainer(folders["llama"], LOSS, torch.optim.SGD).gradients(samples)
    settings = settings_for(folders["llama"], compute_dtype=compute_dtype) | {"matmul_precision": "highest"}
    assert run_alone(loss_and_norm_on_a_gpu, settings, samples) == pytest.approx(expected, rel=tolerance)


def loss_and_norm_on_one_gpu(
    groups: Groups, members: tuple[int, ...], settings: dict, samples: list[Sample], replicas: int
) -> tuple[float, float]:
    on_gpu = Groups(dist.get_rank(), 1, "cuda:0", groups._store, 60.0)
    context = ParallelContext(on_gpu, ParallelLayout.of(members, dp_replicate=replicas))
    trainer = Trainer(TrainerConfig.model_validate(settings), context, "cuda:0")
    trainer.forward_backward(pack(samples, len(members), 34)[context.data_parallel_rank])
    report = trainer.optim_step(loss_denominator(samples))
    return report.loss, report.grad_norm


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("num_ranks", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_slots_that_share_a_gpu_compute_the_same(folders: dict[str, Path], num_ranks: int, replicas: int) -> None:
    samples = make_samples((20, 3, 9, 31, 8))
    expected = NaiveTrainer(folders["qwen3"], LOSS, torch.optim.SGD).gradients(samples)
    settings = settings_for(folders["qwen3"], compute_dtype="float32") | {"matmul_precision": "highest"}
    for found in run_ranks(num_ranks, loss_and_norm_on_one_gpu, settings, samples, replicas, timeout_s=60.0):
        assert found == pytest.approx(expected, rel=1e-4)


def is_wrapped(groups: Groups, members: tuple[int, ...], settings: dict) -> bool:
    trainer = Trainer(TrainerConfig.model_validate(settings), ParallelContext(groups, ParallelLayout.of(members)))
    return isinstance(trainer.model, FSDPModule)


@pytest.mark.parametrize(
    ("num_ranks", "compute", "wrapped"), [(1, "float32", False), (1, "bfloat16", True), (2, "float32", True)]
)
def test_one_rank_is_wrapped_for_another_precision_alone(folders, num_ranks, compute, wrapped):
    settings = settings_for(folders["qwen3"], compute_dtype=compute)
    assert run_ranks(num_ranks, is_wrapped, settings) == [wrapped] * num_ranks
