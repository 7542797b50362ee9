"""Two real train slots with a tiny model, and what a version of theirs is, as anybody may check it."""

import itertools
import os
import signal
from pathlib import Path

from ductile.cluster.local import LocalCluster
from ductile.config.schema.cluster import ClusterConfig
from ductile.config.schema.trainer import TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fleet.requests.assign_role import assign_role
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.workers import ReleaseRole
from ductile.transport.deadlines import Deadlines
from tests.fleet.live import ranks
from tests.fleet.train_slots import sample

SEQ_LEN = 16
COMMAND_S = 20.0


class Trainers:
    """The trainer's ranks; those that died come again with `begin`."""

    def __init__(self, model: Path, folder: Path, slots: tuple[int, ...] = (0, 1)) -> None:
        self.slots, self.folder = slots, folder
        self.points = folder / "points"
        self.points.mkdir(parents=True)
        config = TrainerConfig.model_validate(
            {
                "model": {"name": str(model), "seq_len": SEQ_LEN, "compute_dtype": "float32"},
                "optim": {"type": "adamw", "lr": 5e-3},
                "loss": {"type": "sft"},
                "dist_timeout_seconds": 10,
            }
        )
        self.settings = config.model_dump(mode="json")
        self.layout = ParallelLayout.of(slots)
        self.num_steps = 0
        self.is_broken = False
        """A test has made a rank fail, so that the role has to be assigned anew."""
        self._exports = itertools.count()
        self._traced = dict.fromkeys(slots, 0)

    async def start(self) -> None:
        os.environ[ranks.FOLDER] = str(self.points)
        try:
            self.cluster = LocalCluster(self.slots, ClusterConfig(device="cpu"), self.folder, ranks.ROLES)
            self.cluster.ends_without(lambda slot: False)
            await self.cluster.start()
        finally:
            del os.environ[ranks.FOLDER]
        await self.begin()

    async def begin(self) -> None:
        """Have a trainer that is as good as new."""
        mailbox = self.cluster.mailbox
        for slot in self.slots:
            if slot not in mailbox.lost and "train" in mailbox.roles(slot):
                await mailbox.ask(slot, ReleaseRole("train"), COMMAND_S)
        await self.cluster.add([slot for slot in self.slots if slot in mailbox.lost])
        mailbox.epoch += 1
        self.is_broken = False
        await assign_role(mailbox, "train", self.settings, [self.layout], COMMAND_S, self.cluster.rendezvous)
        self.new_remote()
        self.skip_trace()

    def new_remote(self) -> RemoteTrainer:
        """A client of the ranks that knows nothing of what was before."""
        deadlines = Deadlines.same(COMMAND_S)
        self.remote = RemoteTrainer(self.cluster.mailbox, self.layout, deadlines, receivers="servers")
        return self.remote

    @property
    def is_lost(self) -> bool:
        """A rank is gone, or has failed in a collective."""
        return self.is_broken or any(slot in self.cluster.mailbox.lost for slot in self.slots)

    async def stop(self) -> None:
        await self.cluster.stop()

    async def step(self) -> None:
        """An optimizer step, after which every tensor has other values."""
        self.num_steps += 1
        samples = [sample(number % 90 + self.num_steps % 7, 5 + number % 9) for number in range(6)]
        await self.remote.forward_backward(samples, SEQ_LEN)
        await self.remote.optim_step(1.0)

    async def export(self) -> Path:
        folder = self.folder / f"export-{next(self._exports)}"
        await self.remote.export(str(folder), "float32")
        return folder

    def pid(self, slot: int) -> int:
        return self.cluster.processes[slot].pid

    def kill(self, slot: int) -> None:
        os.kill(self.pid(slot), signal.SIGKILL)

    def stop_rank(self, slot: int) -> None:
        os.kill(self.pid(slot), signal.SIGSTOP)

    def cont_rank(self, slot: int) -> None:
        os.kill(self.pid(slot), signal.SIGCONT)

    def skip_trace(self) -> None:
        self._traced = {slot: len(ranks.trace(self.points, slot)) for slot in self.slots}

    def traces(self) -> dict[int, list[str]]:
        """What each rank has done since `skip_trace`: commands that all get, and collectives. The end of an update is
        done beside other commands, so it has no place among them."""
        traces = {slot: ranks.trace(self.points, slot)[begun:] for slot, begun in self._traced.items()}
        return {
            slot: [line for line in lines if not line.startswith("took ") and line not in ("Withdraw", "FinishUpdate")]
            for slot, lines in traces.items()
        }

    def durations(self) -> list[tuple[int, str, float]]:
        """Slot, command and seconds of each command since `skip_trace`."""
        return [
            (slot, line.split()[1], float(line.split()[2]))
            for slot, begun in self._traced.items()
            for line in ranks.trace(self.points, slot)[begun:]
            if line.startswith("took ")
        ]
