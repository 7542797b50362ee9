"""The tensors that are published are those of the forward pass, whole, whatever the layout."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from ductile.config.schema.trainer import TrainerConfig
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric.groups import Groups
from ductile.parallel.parallel_context import ParallelContext
from ductile.trainer.trainer import Trainer
from ductile.weights.shared_memory import SharedMemory
from tests.nightly import mostly_nightly
from tests.ranks import run_ranks
from tests.tiny import make_model_folder
from tests.trainer.naive import make_samples

SEQ_LEN = 34


def publishes_before_and_after_a_step(
    groups: Groups, members: tuple[int, ...], settings: dict, replicas: int
) -> tuple[list[str], bool]:
    context = ParallelContext(groups, ParallelLayout.of(members, dp_replicate=replicas))
    trainer = Trainer(TrainerConfig.model_validate(settings), context)
    samples, publisher = make_samples((20, 3, 9, 31)), SharedMemory()
    before = dict(received(publisher, 0, trainer))
    for version in (1, 2):
        trainer.forward_backward(pack(samples, len(members), SEQ_LEN)[context.data_parallel_rank])
        trainer.optim_step(1.0)
        after = received(publisher, version, trainer)
        for name, tensor in trainer.export_weights(trainer.precision.compute):
            assert torch.equal(after[name], tensor), f"{name} of version {version}"
    wrapped = [isinstance(parameter, DTensor) for parameter in trainer.model.parameters()]
    assert len(set(wrapped)) == 1, "every unit is as it was"
    publisher.close()
    return list(after), all(torch.equal(before[name], after[name]) for name in before)


def received(publisher: SharedMemory, version: int, trainer: Trainer) -> dict[str, torch.Tensor]:
    """Through a real segment: whoever holds gathered memory breaks the next gather."""
    return SharedMemory().receive(publisher.publish(version, trainer.publish_weights()))


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_ranks", "replicas"), mostly_nightly([(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)], (3, 1), (4, 2))
)
def test_what_is_published(tmp_path: Path, num_ranks: int, replicas: int, compute_dtype: str) -> None:
    folder = make_model_folder(tmp_path, "qwen3", head_dim=2, hidden_size=30, intermediate_size=50)
    model = {"name": str(folder), "compute_dtype": compute_dtype, "seq_len": SEQ_LEN}
    settings = TrainerConfig.model_validate({"model": model, "optim": {"type": "adamw", "lr": 1e-2}}).model_dump()
    results = run_ranks(num_ranks, publishes_before_and_after_a_step, settings, replicas)
    for names, is_same in results:
        assert names == results[0][0]
        assert not is_same, "the steps changed the weights"
