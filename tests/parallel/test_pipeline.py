"""Stages of pp compute what one plain module computes: loss, norm, every gradient, and three optimizer steps."""

from pathlib import Path

import pytest
import torch

from ductile.config.trainer import AdamWConfig, GRPOLoss, TrainerConfig
from ductile.core.batch.loss_aggregation import loss_denominator, weigh
from ductile.core.batch.packing import pack
from ductile.core.layout.parallel_layout import ParallelLayout
from ductile.fabric.groups import Groups
from ductile.parallel import data
from ductile.parallel.gathered import full
from ductile.parallel.parallel_context import ParallelContext
from ductile.records import Sample
from ductile.trainer.trainer import Trainer
from tests.ranks import run_ranks
from tests.tiny import make_model_folder
from tests.trainer.naive import NaiveTrainer, make_samples

LOSS = GRPOLoss(kl_coef=0.1, clip_high=0.3)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": make_model_folder(root / "qwen3", "qwen3", head_dim=2, hidden_size=30, num_hidden_layers=4),
        "untied": make_model_folder(root / "llama", "llama", tie_word_embeddings=False, num_hidden_layers=4),
    }


def settings_for(folder: Path, **model: object) -> dict:
    config = {"model": {"name": str(folder), **model}, "loss": LOSS, "optim": AdamWConfig(lr=1e-3)}
    return TrainerConfig.model_validate(config).model_dump()


def gradients(
    groups: Groups,
    members: tuple[int, ...],
    sizes: dict,
    stages: tuple[int, ...],
    settings: dict,
    samples: list[Sample],
) -> tuple[float, float, int, dict[str, list]]:
    context = ParallelContext(groups, ParallelLayout.of(members, stages, **sizes))
    trainer = Trainer(TrainerConfig.model_validate(settings), context)
    mine = pack(weigh(samples, "token_mean"), context.layout.num_data_parallel, 34)[context.data_parallel_rank]
    trainer.forward_backward(mine[:1])  # fewer than there are stages, and accumulated over several commands
    trainer.forward_backward(mine[1:])
    trainer.reduce_gradients()
    count = loss_denominator(samples, "token_mean")
    found = {name: (full(grad) / count).tolist() for name, grad in data.named_gradients(trainer.model).items()}
    report = trainer.optim_step(count)
    return report.loss, report.grad_norm, report.num_tokens, found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduce_every": "step"},
        {"pp_schedule": "zero_bubble"},
        {"pp_schedule": "zero_bubble", "reduce_every": "step"},
    ],
    ids=["", "step", "zb", "zbstep"],
)
@pytest.mark.parametrize(
    ("sizes", "stages"),
    [
        ({"pp": 2}, ()),
        ({"pp": 4}, ()),
        ({"pp": 3}, (0, 1, 1, 2)),
        ({"pp": 2}, (0, 1, 0, 1)),
        ({"pp": 2}, (0, 1, 1, 1)),
        ({"pp": 2, "dp_shard": 2}, (0, 1, 0, 1)),
    ],
)
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_parity(folders, model, sizes, stages, options) -> None:
    samples = make_samples((20, 3, 9, 31, 8, 17, 5, 2, 26, 30, 30, 12), temperatures=(1.0, 0.6))
    naive = NaiveTrainer(folders[model], LOSS, torch.optim.SGD)
    loss, grad_norm = naive.gradients(samples, "token_mean")
    num_slots = sizes["pp"] * sizes.get("dp_shard", 1)
    sizes = {"pp": sizes["pp"]}
    seen = set()
    for result in run_ranks(num_slots, gradients, sizes, stages, settings_for(folders[model], **options), samples):
        assert result[0] == pytest.approx(loss, rel=1e-5)
        assert result[1] == pytest.approx(grad_norm, rel=TOLERANCE)
        assert result[2] == sum(sum(sample.loss_mask) for sample in samples)
        theirs = dict(naive.model.named_parameters())
        for name, grad in result[3].items():
            expected = theirs[name].grad
            error = (torch.tensor(grad) - expected).abs().max() / expected.abs().max()
            assert error < TOLERANCE, name
        seen |= result[3].keys()
    assert seen == theirs.keys()
