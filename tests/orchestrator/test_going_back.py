"""What comes after an attempt that has lost its trainer: another one, or the failure, above slots in memory."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ductile.config.reading.parse import parse
from ductile.config.schema.run import SFTConfig
from ductile.core.instances.placement import Placement
from ductile.core.layout.choice.layout_rules import NO_RULES
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.messages.workers import Done
from ductile.observe import Recorder, read_jsonl
from ductile.orchestrator.commands.going_back import RunAttempt, RunAttempts
from ductile.orchestrator.ending.interrupt import Interrupt
from ductile.orchestrator.ending.meaning import Beginning
from ductile.orchestrator.ending.progress import CheckpointError, Progress
from ductile.orchestrator.ending.run_until import SlotDied
from ductile.roles import Failure, Refused
from ductile.transport.mailbox import Mailbox
from tests.cluster.memory_cluster import MemoryCluster
from tests.transport.memory_transport import MemoryTransport

SLOTS = range(6)
HOME = Placement(tuple(SLOTS), (), (), "as the config says")


class Rig:
    """A run whose last checkpoint is of step `saved`, and whose slots train once they have their role."""

    def __init__(self, folder: Path, max_restarts: int) -> None:
        self.folder, self.saved = folder, [4]
        config = parse(SFTConfig, ["--data.path", "x"], across=False).config
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"max_restarts": max_restarts})})
        self.cluster = MemoryCluster(
            Mailbox(MemoryTransport(dict.fromkeys(SLOTS, lambda slot, command: Done()))), SLOTS
        )
        self.interrupt, self.record = Interrupt(), Recorder(folder)
        session: Any = SimpleNamespace(measures=None, interrupt=self.interrupt, record=self.record)
        self.prepare: Callable[[], Any] = self.prepared
        self.attempts = RunAttempts(config, self.cluster, session, self._prepare)

    def _prepare(self, config: SFTConfig) -> Any:
        assert config.ckpt.resume_step == -1, "the last checkpoint"
        return self.prepare()

    def prepared(self) -> Any:
        step = self.saved[-1] if self.saved else 0
        return SimpleNamespace(
            checkpoints=SimpleNamespace(steps=lambda: self.saved), began=Beginning(Progress(step)), trainer=None
        )

    def first(self) -> RunAttempt[Any]:
        return self.at_work(RunAttempt(self.prepared(), HOME, NO_RULES, 0.0))

    def at_work(self, attempt: RunAttempt[Any]) -> RunAttempt[Any]:
        layout = ParallelLayout.of(attempt.placement.train)
        resizer: Any = SimpleNamespace(layout=layout, rules=NO_RULES, depends_on=lambda slot: slot in layout.slots)
        self.cluster.ends_without(resizer.depends_on)
        attempt.trains_by(resizer)
        return attempt

    async def loses(self, attempt: RunAttempt[Any], slot: int) -> RunAttempt[Any]:
        self.cluster.kill(slot)
        return await self.attempts.after(attempt, SlotDied(await self.cluster.death()))

    def went_back(self) -> list[tuple[int, list[int], int]]:
        rows = read_jsonl(self.folder / "events.jsonl")
        return [(row["step"], row["after"], row["num_in_row"]) for row in rows if row["kind"] == "went_back"]


def play(folder: Path, story: Callable[[Rig], Any], max_restarts: int = 2) -> None:
    async def whole() -> None:
        rig = Rig(folder, max_restarts)
        try:
            await story(rig)
        finally:
            rig.record.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_it_counts_how_often_it_goes_back_to_the_same_checkpoint(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        attempt = rig.first()
        for slot in (5, 4):
            attempt = rig.at_work(await rig.loses(attempt, slot))
        rig.saved = [4, 8]
        for slot in (3, 2):
            attempt = rig.at_work(await rig.loses(attempt, slot))
        assert attempt.placement.train == (0, 1)
        with pytest.raises(SlotDied) as raised:
            await rig.loses(attempt, 1)
        assert str(raised.value) == (
            "slot 1 was killed by SIGKILL; the trainer cannot go back to a checkpoint: it has gone back 2 times in a "
            "row without a new checkpoint (cluster.max_restarts)"
        )
        on = [list(range(n)) for n in (5, 4, 3, 2)]
        assert rig.went_back() == [(4, on[0], 1), (4, on[1], 2), (8, on[2], 1), (8, on[3], 2)]

    play(tmp_path, story)


def test_slots_that_do_not_start_are_tried_again(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.cluster.num_refused = 1
        attempt = await rig.loses(rig.first(), 5)
        assert attempt.placement.train == (0, 1, 2, 3, 4)
        assert not rig.cluster.mailbox.lost.keys() & {*attempt.placement.train}
        assert rig.went_back() == [(4, [0, 1, 2, 3, 4], 1), (4, [0, 1, 2, 3, 4], 2)]

    play(tmp_path, story)


def test_slots_that_are_lost_before_they_have_their_role_are_tried_again(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        attempt = await rig.loses(rig.first(), 5)  # it never gets to work
        again = await rig.loses(attempt, 3)
        assert again.placement.train == (0, 1, 2, 3, 4), "the node of slot 3 is there"

    play(tmp_path, story)


def test_a_checkpoint_that_cannot_be_read_ends_the_run(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        def broken() -> Any:
            raise CheckpointError("progress.json cannot be read")

        rig.prepare = broken
        with pytest.raises(SlotDied, match=r"; the trainer cannot go back to a checkpoint: progress\.json cannot be"):
            await rig.loses(rig.first(), 5)
        assert rig.went_back() == []

    play(tmp_path, story)


@pytest.mark.parametrize("case", ["no slot is lost", "max_restarts is 0", "it is to stop", "nothing is saved"])
def test_a_failure_that_is_nothing_to_go_back_for_stays_what_it_is(tmp_path: Path, case: str) -> None:
    async def story(rig: Rig) -> None:
        attempt, failure = rig.first(), Refused("slot 0 (train, pid 7): the loss is no number", 0)
        if case != "no slot is lost":
            rig.cluster.kill(5)
        if case == "it is to stop":
            rig.interrupt.graceful.set()
        if case == "nothing is saved":
            prepared = rig.prepared()
            prepared.checkpoints = None
            attempt = RunAttempt(prepared, HOME, NO_RULES, 0.0)
        with pytest.raises(Failure) as raised:
            await rig.attempts.after(attempt, failure)
        assert raised.value is failure
        assert rig.went_back() == []

    play(tmp_path, story, max_restarts=0 if case == "max_restarts is 0" else 2)
