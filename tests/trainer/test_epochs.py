"""One process, many epochs: trainers are built on ever new groups of the same slots, and leave nothing behind."""

import os
from pathlib import Path

import pytest

from ductile.config.schema.trainer import SFTLoss, SGDConfig, TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric.groups import Groups
from ductile.parallel.parallel_context import ParallelContext
from ductile.records import MicroBatch, StepReport
from ductile.trainer.trainer import Trainer
from tests.ranks import run_ranks
from tests.tiny import make_model_folder
from tests.trainer.naive import make_samples


def train_in_many_epochs(
    groups: Groups, members: tuple[int, ...], settings: dict, num_epochs: int
) -> tuple[list[StepReport], list[int], list[int]]:
    slot = members[ParallelContext(groups, ParallelLayout.of(members)).data_parallel_rank]
    reports, num_fds, num_threads = [], [], []
    for turn in range(2 * num_epochs):
        of_epoch = Groups(slot, 1 + turn // 2, "cpu", groups._store, 30.0)  # each twice: held, dropped, held again
        trainer = Trainer(TrainerConfig.model_validate(settings), ParallelContext(of_epoch, ParallelLayout.of(members)))
        trainer.forward_backward([MicroBatch(tuple(make_samples((9, 14))))])
        reports.append(trainer.optim_step(20.0))
        assert sum(tensor.numel() for _, tensor in trainer.publish_weights()) == trainer.spec.num_parameters
        del trainer
        of_epoch.destroy()
        num_fds.append(len(os.listdir("/proc/self/fd")))
        num_threads.append(len(os.listdir("/proc/self/task")))
    return reports, num_fds, num_threads


def test_a_trainer_in_every_epoch(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    sections = {"model": {"name": str(folder)}, "loss": SFTLoss(), "optim": SGDConfig(lr=0.1)}
    settings = TrainerConfig.model_validate(sections).model_dump()
    for reports, num_fds, num_threads in run_ranks(2, train_in_many_epochs, settings, 6):
        assert all(report.loss == pytest.approx(reports[0].loss, rel=1e-6) for report in reports)
        assert all(report.grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-6) for report in reports)
        assert max(num_fds[4:]) <= num_fds[4] + 1, num_fds
        assert max(num_threads[4:]) <= num_threads[4] + 1, num_threads
