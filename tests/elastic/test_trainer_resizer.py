"""Resizes of real slots, and what becomes of them when one is killed or stopped at each point of the transaction."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ductile.cluster.local import LocalCluster
from ductile.config.schema.cluster import ClusterConfig
from ductile.config.schema.trainer import TrainerConfig
from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import LayoutRules
from ductile.core.layout.choice.requested_layout import LayoutRequest
from ductile.core.layout.geometry.parallel_layout import ParallelDims, ParallelLayout
from ductile.elastic.loss_log import LossLog
from ductile.elastic.trainer_resizer import CannotResize, ResizeNotDone, TrainerResizer
from ductile.elastic.transaction import ResizeOptions
from ductile.fleet.requests.assign_role import assign_role
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.control import Resized
from ductile.messages.workers import Done, Ping, ReleaseRole
from ductile.observe import Recorder, read_jsonl
from ductile.roles import TrainerLost
from ductile.transport.deadlines import Deadlines
from tests.cluster.processes import is_running
from tests.fleet.train_slots import sample
from tests.nightly import mostly_nightly
from tests.slot.held import HELD_ECHO, HELD_TRAINER, POINTS, arm, reached
from tests.tiny import make_model_folder
from tests.transport.transports import eventually

LAYOUT = ParallelLayout.of((0, 1))
LEAVER, STAYER, JOINER = 0, 1, 2
SEQ_LEN = 16
NUM_SLOTS = 8
DEADLINE_S = 60.0


class Harness:
    """A cluster whose slots die and come again, and a trainer on two of them for each test."""

    def __init__(self, folder: Path, roles: Mapping[Any, str], settings: dict[str, Any], timeout_s: float) -> None:
        self.folder, self.settings, self.timeout_s = folder, settings, timeout_s
        self.points = folder / "points"
        self.points.mkdir()
        os.environ[POINTS] = str(self.points)
        self.runner = asyncio.Runner()
        self.cluster = LocalCluster([0, 1], ClusterConfig(device="cpu"), folder, roles)
        self.runner.run(self.cluster.__aenter__())
        del os.environ[POINTS]
        self.mailbox = self.cluster.mailbox

    def run(self, story: Coroutine[Any, Any, None]) -> None:
        self.runner.run(asyncio.wait_for(self._from_scratch(story), 150))

    async def _from_scratch(self, story: Coroutine[Any, Any, None]) -> None:
        for point in self.points.iterdir():
            point.unlink()
        self.cluster.ends_without(lambda slot: False)
        for slot in self.cluster.slots:
            if slot not in self.mailbox.lost and "train" in self.mailbox.roles(slot):
                await self.mailbox.ask(slot, ReleaseRole("train"), 60)
        await self.cluster.add([LEAVER, STAYER])
        self.mailbox.epoch += 1
        self.cluster._death = asyncio.get_running_loop().create_future()
        await assign_role(self.mailbox, "train", self.settings, [LAYOUT], 30, self.cluster.rendezvous)
        self.record = Recorder(self.folder)
        self.trainer = RemoteTrainer(self.mailbox, LAYOUT, Deadlines.same(30))
        terms = ResizeOptions(self.settings, self.cluster.rendezvous, self.timeout_s, leave_s=5)
        self.resizer = TrainerResizer(self.cluster, self.trainer, terms, self.record, NUM_SLOTS)
        self.num_steps = 0
        training = asyncio.create_task(self._train())
        try:
            with LossLog(self.cluster, self.resizer, self.record):
                await story
        finally:
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
            self.record.close()

    async def _train(self) -> None:
        while True:
            await self.trainer.forward_backward([sample(n % 90, 4 + n % 9) for n in range(12)], SEQ_LEN)
            await self.trainer.optim_step(1.0)
            self.num_steps += 1

    async def trains_on(self) -> None:
        """Two more whole steps."""
        done = self.num_steps
        await eventually(lambda: self.num_steps >= done + 2)

    def on(self, slots: Iterable[int], dp_replicate: int | None = None) -> ParallelLayout:
        """The trainer's layout on these slots, as `ductile resize` asks for it."""
        sizes = {} if dp_replicate is None else {"dp_replicate": dp_replicate}
        return self.resizer.layout_of(LayoutRequest(train=tuple(slots), sizes=sizes))

    async def resize_and_hit(self, victim: int, command: str, moment: str, signum: signal.Signals) -> Resized:
        """1 and 2 instead of 0 and 1, with `victim` getting the signal at that point."""
        if victim != JOINER or command != "AssignRole":
            await self.cluster.add([JOINER])
        arm(self.points, victim, command, moment)
        resizing = asyncio.create_task(self.resizer.resize(self.on([STAYER, JOINER])))
        await eventually(lambda: reached(self.points, victim, command, moment))
        process = self.cluster.processes[victim]
        process.signal(signum)
        async with asyncio.timeout(DEADLINE_S):
            try:
                return await resizing
            finally:
                # It is finalized only when nothing of the victim is left.
                await eventually(lambda: not is_running(process.pid) or victim not in self.mailbox.lost)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_jsonl(self.folder / "events.jsonl") if row["kind"] == kind]

    def close(self) -> None:
        pids = [process.pid for process in self.cluster.processes.values()]
        self.runner.run(self.cluster.stop())
        self.runner.close()
        assert not [pid for pid in pids if is_running(pid)]


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory):
    harness = Harness(tmp_path_factory.mktemp("echo"), HELD_ECHO, {}, timeout_s=0.3)
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("trainer")
    model = {"name": str(make_model_folder(folder / "model")), "seq_len": SEQ_LEN}
    config = TrainerConfig.model_validate({"model": model, "resize": {"timeout_s": 20.0}, "loss": {"type": "sft"}})
    harness = Harness(folder, HELD_TRAINER, config.model_dump(mode="json"), timeout_s=20.0)
    yield harness
    harness.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is late is looked at for a fifth of the time: `tests.slot.held` has its signs of life come ten times as
    often as a run's."""
    monkeypatch.setattr("ductile.elastic.participants.GRACE_S", 0.2)
    monkeypatch.setattr("ductile.elastic.participants.NUM_LOOKS", 5)


def expected(victim: int, command: str, moment: str) -> str:
    """What the rules of `ductile.core.scheduling.resize_rulings` say, by point: a dumb twin."""
    if victim == STAYER:
        return "lost"
    if victim == JOINER:
        return "lost" if command == "Finalize" else "rolled_back"
    return "resized" if command in ("Commit", "Finalize") else "lost"


POINTS_OF_ALL = [
    (command, moment)
    for command in ("Prepare", "Freeze", "TransferState", "Commit", "Finalize")
    for moment in ("before", "after")
]
CELLS = [(victim, *point) for victim in (LEAVER, STAYER, JOINER) for point in POINTS_OF_ALL]
CELLS += [(JOINER, "AssignRole", "before"), (JOINER, "AssignRole", "after")]


def one_of_each_phase(moment: str) -> list[tuple[int, str, str]]:
    """Return a point of each phase, another victim's in turn. `test_transaction.py` has all of them, in memory."""
    phases = ("AssignRole", "Prepare", "Freeze", "TransferState", "Commit", "Finalize")
    victims = (JOINER, LEAVER, STAYER)
    return [(victims[place % 3], command, moment) for place, command in enumerate(phases)]


async def play(harness: Harness, victim: int, command: str, moment: str, signum: signal.Signals) -> None:
    outcome, told_before = expected(victim, command, moment), len(harness.events("slot_lost"))
    if outcome == "lost":
        with pytest.raises(
            ResizeNotDone, match=f"slot {victim}.*; slot {victim} held 1 of 2 parts of the trainer's state"
        ):
            await harness.resize_and_hit(victim, command, moment, signum)
        with pytest.raises(TrainerLost):
            await harness.trainer.optim_step(1.0)
        assert f"slot {victim}" in await harness.cluster.death()
    else:
        result = await harness.resize_and_hit(victim, command, moment, signum)
        assert result.outcome == outcome, result.sentence
        assert harness.trainer.layout == (ParallelLayout.of((STAYER, JOINER)) if outcome == "resized" else LAYOUT)
        await harness.trains_on()
    # A death that ends the run is told at its end, and no event says that the run goes on.
    told = [event["slot"] for event in harness.events("slot_lost")[told_before:]]
    assert told == ([] if outcome == "lost" else [victim])
    killed = "was killed by SIGKILL" if signum == signal.SIGKILL else "has been killed"
    assert killed in harness.mailbox.lost[victim]
    for slot in {LEAVER, STAYER, JOINER} - {victim}:
        assert await harness.mailbox.ask(slot, Ping(), 60) == Done()


@pytest.mark.parametrize(
    ("victim", "command", "moment"), mostly_nightly(CELLS, *one_of_each_phase("before"), *one_of_each_phase("after"))
)
def test_a_kill_at_each_point(echo: Harness, victim: int, command: str, moment: str):
    echo.run(play(echo, victim, command, moment, signal.SIGKILL))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "command", "moment"),
    mostly_nightly([cell for cell in CELLS if cell[2] == "before"], *one_of_each_phase("before")),
)
def test_a_stop_at_each_point(echo: Harness, victim: int, command: str, moment: str, hasty: None):
    """Echoes do not wait for each other: of one that stops after a command, and not before, nobody sees anything else.
    Of a trainer they would, below."""
    echo.run(play(echo, victim, command, moment, signal.SIGSTOP))


REAL_POINTS = (
    (("Prepare", "before"), signal.SIGKILL),
    (("Freeze", "after"), signal.SIGKILL),
    (("TransferState", "before"), signal.SIGKILL),
    (("Commit", "after"), signal.SIGKILL),
    (("TransferState", "before"), signal.SIGSTOP),
    (("Commit", "after"), signal.SIGSTOP),
)
REAL_CELLS = [(victim, *point) for victim in (LEAVER, STAYER, JOINER) for point in REAL_POINTS]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "point", "signum"), mostly_nightly(REAL_CELLS, *REAL_CELLS[::5]))
def test_a_real_trainer_outlives_it_or_says_what_was_lost(
    trainer: Harness, victim: int, point, signum, hasty: None, monkeypatch: pytest.MonkeyPatch
):
    """Who stops at any other point: echoes above, and real trainers in `tests/trainer/test_resize_failures.py`."""
    impatient = trainer.settings | {"resize": trainer.settings["resize"] | {"timeout_s": 1.5}}
    monkeypatch.setattr(trainer, "settings", impatient)
    monkeypatch.setattr(trainer, "timeout_s", 1.5)

    async def story():
        await play(trainer, victim, *point, signum)

    trainer.run(story())


@pytest.mark.slow
def test_a_real_trainer_goes_everywhere_and_slots_stay_warm(trainer: Harness):
    async def story():
        pids = {}
        for members, replicas in [((0, 1, 2), 1), ((3,), 1), ((2, 0), 2), ((0, 1, 2, 3), 2), ((1, 0), 1)]:
            result = await trainer.resizer.resize(trainer.on(members, replicas))
            assert result.outcome == "resized", result.sentence
            assert trainer.trainer.layout == ParallelLayout.of(members, dp_replicate=replicas)
            await trainer.trains_on()
            pids |= {slot: trainer.cluster.processes[slot].pid for slot in members}
        assert pids == {slot: trainer.cluster.processes[slot].pid for slot in pids}, "nobody was started twice"
        roles = {slot: trainer.mailbox.roles(slot) for slot in range(4)}
        assert roles == {0: ("train",), 1: ("train",), 2: (), 3: ()}
        assert len({event["epoch"] for event in trainer.events("resized")[-5:]}) == 5

    trainer.run(story())


def test_what_cannot_be_is_refused_and_nothing_is_tried(echo: Harness):
    async def story():
        epoch = echo.mailbox.epoch
        for members, replicas, sentence in [
            ((), 1, "slots = 0 are too few: a layout needs at least one"),
            ((1, 1), 1, "a layout has each of its slots once, and 1 several times"),
            ((0, 1, 2), 2, "dp_replicate = 2 must divide the number of train slots, 3: write 1 or 3"),
            ((0, -1), 1, "slot -1 does not exist"),
            ((0, 8), 1, "slot 8 does not exist: the run may have slots 0 to 7, as deployment.gpus_per_node says"),
            (range(12), 1, "slots 8-11 do not exist"),
        ]:
            with pytest.raises(CannotResize, match=sentence):
                await echo.resizer.resize(echo.on(members, replicas))
        same = await echo.resizer.resize(echo.on((0, 1)))
        assert (same.outcome, same.sentence) == ("unchanged", "Trainer is on slots 0-1 already.")
        assert echo.mailbox.epoch == epoch

    echo.run(story())


def test_slots_from_outside_are_a_set(echo: Harness):
    async def story():
        await echo.resizer.resize(echo.on((1, 0)))
        assert (await echo.resizer.resize_to(echo.on((0, 1)))).outcome == "unchanged"
        grown = await echo.resizer.resize_to(echo.on((0, 1, 2)))
        assert grown.after.slots == (1, 2, 0), "what moves least"
        assert "from slots 0-1 to slots 0-2 in" in grown.sentence
        with pytest.raises(CannotResize, match="dp_replicate = 2 must divide the number of train slots, 3"):
            await echo.resizer.resize_to(echo.on((0, 1, 2), 2))

    echo.run(story())


def test_the_state_has_as_many_copies_as_were_asked_for_last_where_the_slots_allow_it(echo: Harness):
    async def story():
        async def resized(train: tuple[int, ...], **sizes: int) -> Resized:
            return await echo.resizer.resize_as(LayoutRequest(train=train, sizes=sizes))

        assert (await resized((0, 1), dp_replicate=2)).after.dims.dp_replicate == 2
        assert (await resized((0, 1))).outcome == "unchanged"
        assert [(await resized(tuple(range(n)))).after.dims.dp_replicate for n in (4, 3, 4)] == [2, 1, 2]
        assert (await resized((0, 1, 2), dp_replicate=1)).after.dims.dp_replicate == 1
        event = echo.events("resized")[-1]
        assert (event["before_dims"]["dp_replicate"], event["after_dims"]["dp_replicate"]) == (2, 1)
        assert (event["before_dims"]["dp_shard"], event["after_dims"]["dp_shard"]) == (2, 3)
        assert (await resized((0, 1, 2, 3))).after.dims.dp_replicate == 1

    echo.run(story())


def test_a_whole_layout_is_asked_for_on_the_slots_that_come_first(echo: Harness):
    async def story():
        async def resized(text: str, train: tuple[int, ...] | None = None) -> Resized:
            return await echo.resizer.resize_as(LayoutRequest(text, train))

        both = await resized("tp=2")
        assert both.after.dims == ParallelDims(tp=2)
        assert both.sentence.startswith("Trainer resized from slots 0-1 to slots 0-1 as tp 2 in ")
        grown = await resized("pp=2,dp_shard=1,tp=2")
        assert sorted(grown.after.slots) == [0, 1, 2, 3]
        assert "from slots 0-1 as tp 2 to slots 0-3 as pp 2 · tp 2 in" in grown.sentence
        assert sorted((await resized("dp_shard=1,cp=2", (2, 3))).after.slots) == [2, 3]
        for text, train, says in (
            ("tp=16", None, "the layout needs 16 slots, and there are 8: write smaller sizes"),
            ("tp=2", (1, 2, 3), "tp = 2 must divide the number of train slots, 3: write 1 or 3"),
            ("dp_shard=3,tp=2", (1, 2), "dp_shard = 3 makes 6 slots with tp 2, and the trainer has 2: write 1"),
            ("dp=2", None, "the layout 'dp=2': 'dp' is no axis: write dp_shard (shards of a copy) or dp_replicate"),
            ("", None, "neither slots nor a layout are asked for: write one of them, or both"),
        ):
            with pytest.raises(CannotResize) as caught:
                await resized(text, train)
            assert str(caught.value).startswith(says)

    echo.run(story())


def test_sizes_that_were_asked_for_by_hand_come_before_listed_ones_where_they_fit(echo: Harness):
    async def story():
        echo.resizer.rules = LayoutRules(listed=("dp_shard=2,cp=2", "dp_shard=3"), asked=AskedLayout(pp=2))

        async def resized(train: tuple[int, ...], text: str = "") -> ParallelDims:
            return (await echo.resizer.resize_as(LayoutRequest(text, train))).after.dims

        assert await resized((0, 1, 2, 3)) == ParallelDims(dp_shard=2, cp=2)
        assert await resized((0, 1), "tp=2") == ParallelDims(tp=2)
        assert await resized((0, 1, 2, 3)) == ParallelDims(dp_shard=2, tp=2)
        assert await resized((0, 1, 2)) == ParallelDims(dp_shard=3)
        with pytest.raises(CannotResize, match="5 slots are no multiple of pp 2, which is asked for: train on 4 or 6"):
            await resized((0, 1, 2, 3, 4))
        assert echo.trainer.layout.slots == (0, 1, 2)

    echo.run(story())


def test_one_change_at_a_time(echo: Harness):
    async def story():
        arm(echo.points, STAYER, "Freeze", "before")
        first = asyncio.create_task(echo.resizer.resize(echo.on([1, 2])))
        await eventually(lambda: reached(echo.points, STAYER, "Freeze", "before"))
        assert echo.resizer.under_way == "freeze, to slots 1-2"
        with pytest.raises(ResizeNotDone, match="the trainer is on its way to slots 1-2: one resize at a time"):
            await echo.resizer.resize(echo.on([0]))
        echo.cluster.processes[STAYER].signal(signal.SIGKILL)
        with pytest.raises(ResizeNotDone):
            await first
        assert echo.resizer.under_way == ""

    echo.run(story())


def test_a_failure_that_nobody_thought_of_is_told_and_taken_back(echo: Harness, monkeypatch: pytest.MonkeyPatch):
    async def story():
        def broken(keys: object) -> str:
            raise KeyError("a bug")

        monkeypatch.setattr("ductile.elastic.transaction.violation_in_plans", broken)
        sentence = "Trainer is on slots 0-1; its resize to slots 1-2 failed: KeyError: 'a bug'"
        with pytest.raises(ResizeNotDone, match=sentence):
            await echo.resizer.resize(echo.on([1, 2]))
        monkeypatch.undo()
        event = echo.events("resize_rolled_back")[-1]
        assert event["sentence"] == f"{sentence}."
        assert "violation_in_plans" in event["traceback"]
        await echo.trains_on()
        assert (await echo.resizer.resize(echo.on([1, 2]))).outcome == "resized"

    echo.run(story())


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=lambda signum: signum.name)
def test_nobody_waits_for_a_joiner_that_dies_while_it_prepares(
    trainer: Harness, signum: signal.Signals, hasty: None, monkeypatch: pytest.MonkeyPatch
):
    """The other joiner and the members have much longer than this test may take."""
    patient = trainer.settings | {"resize": trainer.settings["resize"] | {"timeout_s": 500.0}}
    monkeypatch.setattr(trainer, "settings", patient)
    monkeypatch.setattr(trainer, "timeout_s", 500.0 if signum == signal.SIGKILL else 1.0)

    async def story():
        await trainer.cluster.add([JOINER, 3])
        arm(trainer.points, JOINER, "Prepare", "before")
        resizing = asyncio.create_task(trainer.resizer.resize(trainer.on([0, JOINER, 3])))
        await eventually(lambda: reached(trainer.points, JOINER, "Prepare", "before"))
        await trainer.trains_on()
        trainer.cluster.processes[JOINER].signal(signum)
        async with asyncio.timeout(DEADLINE_S):
            result = await resizing
        assert result.outcome == "rolled_back"
        assert "slot 2" in result.sentence
        assert list(trainer.mailbox.lost) == [JOINER]
        await trainer.trains_on()
        assert (await trainer.resizer.resize(trainer.on([0, 3]))).outcome == "resized"

    trainer.run(story())


def test_a_slot_that_does_not_start_changes_nothing(echo: Harness, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(echo, "timeout_s", 5.0)  # the second change is to be done, however busy the machine is

    async def story():
        hasty = echo.cluster._config.model_copy(update={"start_timeout_s": 0.0})
        monkeypatch.setattr(echo.cluster, "_config", hasty)
        with pytest.raises(CannotResize, match=r"slots 7 did not start within 0 s"):
            await echo.resizer.resize(echo.on([0, 1, 7]))
        monkeypatch.undo()
        await echo.trains_on()
        resized = await echo.resizer.resize(echo.on([0, 7]))
        assert resized.outcome == "resized", resized.sentence
        assert echo.mailbox.roles(1) == ()

    echo.run(story())


def test_a_slot_that_ends_at_once_is_told_of_and_nobody_goes_on_listening(
    echo: Harness, monkeypatch: pytest.MonkeyPatch
):
    async def story():
        listeners = len(echo.mailbox._listeners)
        monkeypatch.setattr(echo.cluster._home, "_devices", SimpleNamespace(of=lambda slot: "cuda:99"))
        with pytest.raises(CannotResize, match=r"slot 6.* ended with exit code 1 \("):
            await echo.resizer.resize(echo.on([0, 6]))
        monkeypatch.undo()
        assert 6 not in echo.cluster.slots  # it has never been there: no status shows it
        assert (await echo.resizer.resize(echo.on([0, 6]))).outcome == "resized"
        assert (await echo.resizer.resize(echo.on([0, 1]))).outcome == "resized"
        assert len(echo.mailbox._listeners) == listeners

    echo.run(story())


def test_a_death_that_nothing_depends_on_does_not_end_the_run(echo: Harness):
    async def story():
        await echo.resizer.resize(echo.on([1, 2]))
        for slot in (0, 1, 2):
            assert echo.resizer.depends_on(slot) == (slot != 0)
        process = echo.cluster.processes[0]
        process.signal(signal.SIGKILL)
        await eventually(lambda: 0 in echo.mailbox.lost)
        await echo.trains_on()
        assert not echo.cluster._death.done()
        assert (await echo.resizer.resize(echo.on([0, 1, 2]))).outcome == "resized"
        assert echo.cluster.processes[0].pid != process.pid

    echo.run(story())


def test_a_hundred_resizes_leave_nothing_behind(echo: Harness):
    def held() -> dict[str, int]:
        pids = [os.getpid(), *(process.pid for process in echo.cluster.processes.values() if process.code is None)]
        return {f"{what} of {pid}": len(os.listdir(f"/proc/{pid}/{what}")) for pid in pids for what in ("fd", "task")}

    async def story():
        layouts = [(1, 2), (3,), (0, 1, 2, 3), (2, 0)]
        before = {}
        for number in range(100):
            if number == 8:
                before = held()
            assert (await echo.resizer.resize(echo.on(layouts[number % 4]))).outcome == "resized"
        assert held() == before
        assert len(asyncio.all_tasks()) < 20
        await echo.trains_on()

    echo.run(story())
