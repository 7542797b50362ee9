"""Slots that share a GPU have gloo's collectives for CUDA tensors: a trainer must ask for no others."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from ductile.config.schema.trainer import SFTLoss, TrainerConfig
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric.groups import Groups
from ductile.parallel.parallel_context import ParallelContext
from ductile.trainer.joint_publisher import JointPublisher
from ductile.trainer.state import named_state, parts_of
from ductile.trainer.trainer import Trainer
from tests.nightly import mostly_nightly
from tests.ranks import run_ranks
from tests.tiny import make_model_folder
from tests.trainer.naive import make_samples

ON_A_GPU = {
    f"c10d::{name}" for name in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "barrier", "broadcast_")
}
"""What ProcessGroupGloo does with CUDA tensors, of what a trainer may want (it also has reduce, scatter, gather and
all-to-all). All else of `torch.distributed` goes by other names, DTensor's gathers by those of
`_c10d_functional`."""


class Asked(TorchDispatchMode):
    """The collectives that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def asked_of_gloo(groups: Groups, members: tuple[int, ...], settings: dict, sizes: dict[str, int]) -> set[str]:
    """By everything that a trainer does together with others, but for checkpoints, which speak through the CPU."""
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        setattr(FSDPModule, name, lambda *_: None)  # those of CPUs: on a GPU FSDP2 keeps its own
    with Asked() as asked:
        context = ParallelContext(groups, ParallelLayout.of(members, **sizes))
        trainer = Trainer(TrainerConfig.model_validate(settings), context)
        num_parts = context.layout.num_data_parallel
        trainer.forward_backward(pack(make_samples((9, 14, 5)), num_parts, 64)[context.data_parallel_rank])
        trainer.optim_step(20.0)
        publisher = JointPublisher()
        publisher.publish(1, trainer, parts_of(named_state(trainer)))
        publisher.close()
        whole = dict(trainer.publish_weights())
    assert all(type(tensor) is torch.Tensor for tensor in whole.values())
    return asked.names


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "style"),
    mostly_nightly(
        [
            (2, {}, "ring"),
            (3, {}, "ring"),
            (4, {"dp_replicate": 2}, "ring"),
            (2, {"cp": 2}, "ring"),
            (4, {"cp": 2}, "ulysses"),
        ],
        (4, {"dp_replicate": 2}, "ring"),
        (2, {"cp": 2}, "ring"),
        (4, {"cp": 2}, "ulysses"),
    ),
)
def test_a_trainer_asks_for_what_gloo_has_on_a_gpu(tmp_path, num_ranks: int, sizes: dict[str, int], style: str) -> None:
    model = {"name": str(make_model_folder(tmp_path / "model", "qwen3")), "cp_style": style}
    settings = TrainerConfig.model_validate({"model": model, "loss": SFTLoss()}).model_dump()
    for asked in run_ranks(num_ranks, asked_of_gloo, settings, sizes):
        assert asked == ON_A_GPU | ({"c10d::alltoall_base_"} if "cp" in sizes else set())
