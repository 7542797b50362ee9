"""A lost slot is written down once, and only where the run goes on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.elastic.loss_log import LossLog
from ductile.elastic.trainer_resizer import TrainerResizer
from ductile.elastic.transaction import ResizeOptions
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.observe import Recorder, read_jsonl
from ductile.transport.deadlines import Deadlines
from ductile.transport.mailbox import Mailbox
from tests.cluster.memory_cluster import MemoryCluster
from tests.transport.transports import MemoryTransport

TRAINER, GENERATOR = 0, 1


def events_after_losses(folder: Path, needed: Iterator[bool]) -> list[dict[str, Any]]:
    """The generator is lost, and then the trainer. needed: what the run says of each slot that it is asked about."""

    async def story():
        mailbox = Mailbox(MemoryTransport({}))
        cluster, trainer = (
            MemoryCluster(mailbox, [0, 1]),
            RemoteTrainer(mailbox, ParallelLayout.of((TRAINER,)), Deadlines.same(1.0)),
        )
        record = Recorder(folder)
        resizer = TrainerResizer(cluster, trainer, ResizeOptions({}, "", 1.0, 1.0), record, 2)
        cluster.ends_without(lambda slot: next(needed))
        mailbox._roles[GENERATOR] = ("generate",)
        with LossLog(cluster, resizer, record):
            for slot in (GENERATOR, TRAINER):
                cluster.kill(slot)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        record.close()

    asyncio.run(story())
    return [row for row in read_jsonl(folder / "events.jsonl") if row["kind"] == "slot_lost"]


def test_a_loss_that_the_run_goes_on_with_is_written_with_its_roles(tmp_path: Path):
    [row] = events_after_losses(tmp_path, iter([False, True]))
    assert (row["slot"], row["roles"]) == (GENERATOR, ["generate"])
    assert row["sentence"] == "Slot 1 was killed by SIGKILL."


def test_whether_the_run_ends_is_asked_once_at_the_loss(tmp_path: Path):
    """The layout may have changed before the listeners hear of the loss: the answer would be another one."""
    assert events_after_losses(tmp_path, iter([True, False])) == []
