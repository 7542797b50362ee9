"""The transaction against slots in memory, in virtual time: what each fault comes to, and that no sample is lost."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.orders import Release
from ductile.elastic.participants import GRACE_S, LOOK_S, NUM_LOOKS
from ductile.elastic.transaction import CAUSES_S, ResizeOptions, Transaction
from ductile.fleet.trainer.micro_steps import IN_FLIGHT
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.control import Resized
from ductile.messages.resizes import Commit, Finalize, Freeze, Prepare, Rollback, TransferState
from ductile.messages.workers import (
    AssignRole,
    Done,
    ForwardBackward,
    ForwardBackwardDone,
    Heartbeat,
    OptimStep,
    PreparationEnded,
    ReleaseRole,
    Withdraw,
)
from ductile.roles import SlotLost, TrainerLost
from ductile.transport.deadlines import Deadlines
from ductile.transport.mailbox import Mailbox
from tests.fleet.generate_slots import generator
from tests.fleet.train_slots import TrainSlots, play, sample
from tests.nightly import examples
from tests.orchestrator.doubles import clock
from tests.transport.memory_transport import FaultKind, MemoryTransport

SEQ_LEN = 10
STEPS = {
    "assign": AssignRole,
    "prepare": Prepare,
    "freeze": Freeze,
    "transfer": TransferState,
    "commit": Commit,
    "finalize": Finalize,
}


class Stage:
    """A trainer, its slots, and the resize that they go through."""

    def __init__(self, members: Sequence[int], num_slots: int = 8, keeps_old: bool = True) -> None:
        self.slots = TrainSlots(ParallelLayout.of(members), num_slots)
        self.carrier = MemoryTransport(dict.fromkeys(self.slots.slots, self.slots.respond))
        self.slots.tell = self.carrier.emit
        self.mailbox = Mailbox(self.carrier, clock)
        self.carrier.on_death.add(self.mailbox.lose)
        self.trainer = RemoteTrainer(self.mailbox, ParallelLayout.of(members), Deadlines.same(100))
        self.terms = ResizeOptions({}, "127.0.0.1:1", timeout_s=5, leave_s=50, keeps_old=keeps_old)
        self.killed: list[int] = []
        self._beating: list[asyncio.Task[None]] = []

    async def resize(self, *members: int, replicas: int = 1) -> Resized:
        after = ParallelLayout.of(members, dp_replicate=replicas)
        return await Transaction(self.mailbox, self.trainer, after, self.terms, self.kill, clock).run()

    def beat(self, slot: int) -> None:
        """Have the slot send heartbeats for a quarter of an hour."""

        async def beating() -> None:
            for _ in range(900):
                self.carrier.emit(slot, Heartbeat("something else", 1.0))
                await asyncio.sleep(1)

        self._beating.append(asyncio.create_task(beating()))

    def kill(self, slot: int, sentence: str) -> None:
        self.killed.append(slot)
        self.mailbox.lose(slot, sentence)

    async def train(self, samples: int = 12) -> None:
        await self.trainer.forward_backward([sample(n, 4 + n % 6) for n in range(samples)], SEQ_LEN)
        await self.trainer.optim_step(1.0)

    @property
    def listeners(self) -> int:
        """Of what slots say, beside those that the test has."""
        return len(self.mailbox._listeners)

    async def until(self, command: type) -> None:
        """Returns when a slot has been sent such a command."""
        while not self.sent(command):  # noqa: ASYNC110 (in virtual time)
            await asyncio.sleep(0.01)

    def sent(self, command: type) -> list[int]:
        return sorted(slot for slot, sent in self.carrier.sent if isinstance(sent, command))

    def with_role(self) -> list[int]:
        return [slot.number for slot in self.slots.slots.values() if slot.holds]


def test_a_change_in_the_middle_of_a_batch():
    async def story():
        stage = Stage([0, 1])
        stage.slots.phases |= {"plan": 0.02}
        stage.slots.beside = ("plan",)
        training = asyncio.create_task(stage.train(40))
        await asyncio.sleep(0.035)
        result = await stage.resize(1, 2, 3)
        assert (result.outcome, result.num_bytes, result.reason) == ("resized", 4000, "")
        assert result.carrier == "memory, as there is nothing else"
        assert (result.slot_seconds, result.beside) == ({"transfer": 0.01, "plan": 0.02}, ("plan",))
        assert list(result.seconds) == ["assign", "prepare", "freeze", "transfer", "commit", "finalize"]
        assert result.pause_s == pytest.approx(4 * 0.01), "Freeze to Finalize"
        assert (stage.trainer.layout, stage.mailbox.epoch) == (ParallelLayout.of((1, 2, 3)), 1)
        assert stage.listeners == 1, "the trainer's own"
        assert not training.done()
        await training
        assert stage.slots.trained == [list(range(40))]
        assert stage.slots.wrong == []
        assert stage.with_role() == [1, 2, 3]
        assert (
            stage.sent(Freeze)
            == stage.sent(TransferState)
            == stage.sent(Commit)
            == stage.sent(Finalize)
            == [0, 1, 2, 3]
        )
        assert stage.sent(ReleaseRole) == [0]

    play(story)


def test_training_goes_on_until_all_members_have_prepared():
    async def story():
        stage = Stage([0, 1])
        stage.slots.prepare_s = {1: 0.05}
        training = asyncio.create_task(stage.train(60))
        await asyncio.sleep(0.035)
        result = await stage.resize(0)
        assert result.outcome == "resized"
        asked = [type(command) for slot, command in stage.slots.asked if slot == 1]
        between = asked[asked.index(Prepare) : asked.index(Freeze)]
        assert between.count(ForwardBackward) >= 3
        assert result.pause_s == pytest.approx(4 * 0.01), "nobody stands still to prepare"
        await training
        assert stage.slots.trained == [list(range(60))]
        assert stage.slots.wrong == []

    play(story)


def test_a_micro_step_may_take_longer_than_any_deadline_of_a_change():
    async def story():
        stage = Stage([0, 1])
        stage.beat(0)
        stage.slots.work_s = lambda number, command: (
            30.0 if number == 0 and isinstance(command, ForwardBackward) else 0.01
        )
        training = asyncio.create_task(stage.train(8))
        await asyncio.sleep(1)
        result = await stage.resize(0, 1, 2)
        assert (result.outcome, result.reason) == ("resized", "")
        await training
        assert stage.killed == []
        assert stage.slots.trained == [list(range(8))]
        assert stage.slots.wrong == []

    play(story)


def test_a_change_that_is_prepared_in_time_waits_for_the_micro_step_that_runs():
    """The slots prepare in the middle of it. Only of the first ones, of which nobody knows how long they take, two are
    with the slots."""

    async def story():
        stage = Stage([0, 1])
        stage.slots.work_s = lambda number, command: 3.0 if isinstance(command, ForwardBackward) else 0.01
        stage.slots.prepare_s = {0: 1.0, 1: 2.0}
        training = asyncio.create_task(stage.train(40))
        await asyncio.sleep(2 * 3.0 + 0.5)
        began_s = clock()
        resizing = asyncio.create_task(stage.resize(0))
        await stage.until(Prepare)
        assert clock() - began_s == pytest.approx(0.0, abs=0.1)
        await stage.until(Commit)
        assert clock() - began_s == pytest.approx(2.5, abs=0.1)
        result = await resizing
        assert clock() - began_s == pytest.approx(2.5, abs=0.1), "no micro-step comes before Finalize"
        assert result.outcome == "resized"
        await training
        assert stage.slots.trained == [list(range(40))]
        assert stage.slots.wrong == []

    play(story)


def test_finalize_comes_before_a_command_that_waited_for_the_change():
    async def story():
        stage = Stage([0, 1])
        resizing = asyncio.create_task(stage.resize(0))
        await stage.until(Freeze)
        stepping = asyncio.create_task(stage.trainer.optim_step(1.0))
        await asyncio.gather(resizing, stepping)
        asked = [type(command) for slot, command in stage.carrier.sent if slot == 0]
        assert asked[asked.index(Commit) :] == [Commit, Finalize, OptimStep]

    play(story)


def test_a_member_that_never_prepares_takes_the_change_back():
    async def story():
        stage = Stage([0, 1])
        stage.beat(1)
        stage.slots.prepare_s = {1: 10**6}
        training = asyncio.create_task(stage.train(60))
        result = await stage.resize(0, 1, 2)
        assert (result.outcome, result.reason) == ("rolled_back", "slot 1 did not prepare within 5 s")
        await training
        assert stage.slots.trained == [list(range(60))]
        assert stage.with_role() == [0, 1]
        assert stage.slots.wrong == []

    play(story)


def test_a_slot_that_left_comes_back():
    async def story():
        stage = Stage([0, 1, 2])
        for members in ((0,), (1, 2, 5), (0, 1, 2)):
            assert (await stage.resize(*members)).outcome == "resized"
            await stage.train()
        assert stage.mailbox.epoch == 3
        assert stage.slots.trained == [list(range(12))] * 3
        assert stage.slots.wrong == []

    play(story)


def test_training_stands_still_until_those_that_go_on_have_finalized_and_not_for_a_leaver():
    async def story():
        stage = Stage([0, 1])
        seconds = {0: 4.0, 2: 0.5}
        stage.slots.work_s = lambda number, command: (
            seconds.get(number, 0.01) if isinstance(command, Finalize) else 0.01
        )
        training = asyncio.create_task(stage.train(40))
        result = await stage.resize(1, 2)
        assert result.pause_s == pytest.approx(3 * 0.01 + 0.5)
        assert result.seconds["finalize"] == pytest.approx(0.5)
        assert any(isinstance(c, ForwardBackward) and slot == 2 for slot, c in stage.slots.asked)
        await training

    play(story)


def test_a_leaver_keeps_its_role_until_its_version_is_withdrawn():
    async def story():
        stage = Stage([0, 1])
        await stage.trainer.publish(3)
        resizing = asyncio.create_task(stage.resize(1, 2))
        await asyncio.sleep(5)
        assert stage.sent(ReleaseRole) == []
        await stage.trainer.withdraw(3)
        assert (await resizing).outcome == "resized"
        assert (stage.sent(Withdraw), stage.sent(ReleaseRole)) == ([0], [0])
        assert stage.slots.wrong == []

    play(story)


@pytest.mark.parametrize("step", ["assign", "prepare", "freeze", "transfer", "commit"])
@pytest.mark.parametrize("kind", ["death", "error", "drop"])
def test_a_joiner_that_fails_leaves_the_old_layout_at_work(step: str, kind: FaultKind):
    async def story():
        stage = Stage([0, 1])
        training = asyncio.create_task(stage.train(40))
        await asyncio.sleep(0.035)
        stage.carrier.fail(2, kind, on=STEPS[step])
        result = await stage.resize(1, 2, 3)
        assert result.outcome == "rolled_back"
        said = {"death": "slot 2 died, as asked", "error": "failed, as asked", "drop": "and has been killed"}[kind]
        assert said in result.reason
        assert stage.killed == ([2] if kind == "drop" else [])
        assert (stage.trainer.layout, stage.mailbox.epoch) == (ParallelLayout.of((0, 1)), 1)
        await training
        assert stage.slots.trained == [list(range(40))]
        assert stage.slots.wrong == []
        assert set(stage.with_role()) - {2} == {0, 1}
        # The number of the change that failed is not used again.
        assert (await stage.resize(0, 4)).outcome == "resized"
        assert stage.mailbox.epoch == 2
        await stage.train(5)
        assert stage.slots.trained[-1] == list(range(5))
        assert stage.slots.wrong == []

    play(story)


@pytest.mark.parametrize("step", ["freeze", "transfer", "commit"])
@pytest.mark.parametrize("kind", ["death", "drop"])
@pytest.mark.parametrize("victim", [0, 1])
def test_an_old_member_that_dies_takes_its_part_along(step: str, kind: FaultKind, victim: int):
    async def story():
        stage = Stage([0, 1])
        training = asyncio.create_task(stage.train(40))
        stage.carrier.fail(victim, kind, on=STEPS[step])
        if step == "commit" and victim == 0:  # it is not in the new layout, and has given all it had
            assert (await stage.resize(1, 2)).outcome == "resized"
            await training
            assert stage.slots.trained == [list(range(40))]
            return
        with pytest.raises(TrainerLost, match=f"slot {victim} held 1 of 2 parts of the trainer's state"):
            await stage.resize(1, 2)
        with pytest.raises(TrainerLost, match="held 1 of 2 parts"):
            await training

    play(story)


@pytest.mark.parametrize("kind", ["error", "delay"])
@pytest.mark.parametrize("step", ["prepare", "freeze", "transfer", "commit"])
def test_an_old_member_that_refuses_or_is_slow_goes_on_as_before(step: str, kind: FaultKind):
    async def story():
        stage = Stage([0, 1])
        training = asyncio.create_task(stage.train(40))
        stage.carrier.fail(1, kind, on=STEPS[step], delay_s=5.5)
        result = await stage.resize(1, 2)
        assert result.outcome == ("rolled_back" if kind == "error" else "resized")
        await training
        assert stage.slots.trained == [list(range(40))]
        assert stage.slots.wrong == []

    play(story)


@pytest.mark.parametrize("slow", [1, 2], ids=["member", "joiner"])
@pytest.mark.parametrize("step", ["assign", "prepare", "freeze", "transfer", "commit"])
def test_a_slot_that_is_only_slow_is_waited_for_and_nobody_is_killed(step: str, slow: int):
    async def story():
        stage = Stage([0, 1])
        training = asyncio.create_task(stage.train(40))
        stage.beat(slow)
        stage.carrier.fail(slow, "delay", on=STEPS[step], delay_s=40)
        # Slots execute commands in order: what comes next waits for the slow one.
        stage.slots.work_s = lambda number, command: 40 if (number, type(command)) == (slow, STEPS[step]) else 0.01
        result = await stage.resize(0, 1, 2)
        if step == "assign" and slow == 1:
            assert result.outcome == "resized", "an old member is not asked to hold anything"
        else:
            assert result.outcome == "rolled_back"
            assert re.match(rf"slot {slow} .*did not reply to {STEPS[step].__name__} within 6 s", result.reason)
        assert (stage.killed, stage.mailbox.lost) == ([], {})
        await training
        assert stage.slots.trained == [list(range(40))]

    play(story)


def test_a_slot_that_does_not_even_take_back_ends_the_trainer():
    async def story():
        stage = Stage([0, 1])
        stage.beat(1)
        stage.carrier.fail(1, "drop", on=Freeze)
        stage.carrier.fail(1, "drop", on=Rollback)
        lost = r"Freeze within 6 s;.*Rollback within 600 s;.*; slot 1 held 1 of 2 parts"
        with pytest.raises(TrainerLost, match=lost):
            await stage.resize(0, 2)

    play(story)


def test_a_slot_that_dies_after_it_has_taken_back_while_another_does_ends_the_trainer():
    async def story():
        stage = Stage([0, 1])
        stage.slots.work_s = lambda number, command: 3.0 if (number, type(command)) == (1, Rollback) else 0.01
        stage.carrier.fail(2, "error", on=TransferState)
        resizing = asyncio.create_task(stage.resize(0, 1, 2))
        await stage.until(Rollback)
        await asyncio.sleep(1)
        stage.mailbox.lose(0, "slot 0 died, as asked")
        with pytest.raises(TrainerLost, match=r"^slot 2.*; slot 0 died, as asked; slot 0 held 1 of 2 parts"):
            await resizing
        with pytest.raises(TrainerLost):
            await stage.train()

    play(story)


def test_a_slot_that_dies_while_a_joiner_refuses_the_role_ends_the_trainer():
    async def story():
        stage = Stage([0, 1])
        stage.slots.work_s = lambda number, command: 1.0 if isinstance(command, AssignRole) else 0.01
        stage.carrier.fail(2, "error", on=AssignRole)
        resizing = asyncio.create_task(stage.resize(0, 1, 2, 3))
        await stage.until(AssignRole)
        stage.mailbox.lose(0, "slot 0 died, as asked")
        with pytest.raises(TrainerLost, match=r"^slot 0 died, as asked; slot 0 held 1 of 2 parts of the [^;]*$"):
            await resizing

    play(story)


def test_a_trainer_that_is_lost_is_not_resized():
    async def story():
        stage = Stage([0, 1])
        stage.trainer.lose(TrainerLost("slot 1 did not reply to ForwardBackward within 100 s"))
        with pytest.raises(TrainerLost, match="did not reply to ForwardBackward"):
            await stage.resize(0, 1, 2)
        assert stage.sent(Prepare) == []

    play(story)


def test_an_orchestrator_that_was_suspended_kills_nobody():
    async def story():
        stage = Stage([0, 1])
        for slot in (0, 1, 2):
            stage.carrier.fail(slot, "drop", on=Freeze)
        resizing = asyncio.create_task(stage.resize(0, 1, 2))
        await asyncio.sleep(6.9)  # the deadline is over, nobody has been heard for long; now what waited unread comes
        for slot in (0, 1, 2):
            stage.carrier.emit(slot, Heartbeat("", 0.0))
        assert (await resizing).outcome == "rolled_back"
        assert stage.killed == []
        await stage.train()
        assert stage.slots.trained == [list(range(12))]

    play(story)


@pytest.mark.parametrize("late", [Rollback, ReleaseRole])
def test_joiners_do_not_hold_up_training(late: type):
    async def story():
        stage = Stage([0, 1])
        stage.beat(3)
        stage.slots.work_s = lambda number, command: 4.0 if (number, type(command)) == (3, late) else 0.01
        stage.carrier.fail(2, "death", on=Prepare)
        training = asyncio.create_task(stage.train(60))
        result = await stage.resize(0, 1, 2, 3)
        assert (result.outcome, result.reason) == ("rolled_back", "slot 2 died, as asked")
        assert result.pause_s < 0.1
        assert stage.killed == []
        await training
        assert set(stage.with_role()) == {0, 1, 2}, "2 died with it"
        assert stage.slots.wrong == []

    play(story)


def test_once_a_change_is_taken_back_it_judges_no_death():
    """Joiners may take long to give everything back, while the trainer trains and is needed as ever."""

    async def story():
        stage = Stage([0, 1])
        stage.beat(3)
        stage.slots.work_s = lambda number, command: 4.0 if (number, type(command)) == (3, Rollback) else 0.01
        stage.carrier.fail(2, "death", on=Prepare)
        after = ParallelLayout.of((0, 1, 2, 3))
        transaction = Transaction(stage.mailbox, stage.trainer, after, stage.terms, stage.kill, clock)
        assert [transaction.judges(slot) for slot in range(5)] == [True, True, True, True, False]
        running = asyncio.create_task(transaction.run())
        await asyncio.sleep(1)
        assert not running.done()
        assert not any(transaction.judges(slot) for slot in range(5))
        assert (await running).outcome == "rolled_back"

    play(story)


def test_a_death_is_the_reason_also_where_what_it_broke_is_heard_of_first():
    async def story():
        stage = Stage([0, 1])
        stage.slots.cannot = {0: "could not prepare: its peer is gone"}
        resizing = asyncio.create_task(stage.resize(0, 1, 2))
        await asyncio.sleep(0.5)
        stage.mailbox.lose(2, "slot 2 died, as asked")
        result = await resizing
        assert (result.outcome, result.reason.partition(" (")[0]) == ("rolled_back", "slot 2 died, as asked")

    play(story)


def test_a_slot_that_cannot_prepare_says_why():
    async def story():
        stage = Stage([0, 1])
        stage.slots.cannot = {2: "could not prepare: there is no memory"}
        result = await stage.resize(0, 1, 2)
        assert result.outcome == "rolled_back"
        assert result.reason == "slot 2 (train): could not prepare: there is no memory"
        assert stage.with_role() == [0, 1]
        assert stage.killed == []
        asked = len(stage.carrier.sent)
        training = asyncio.create_task(stage.train(40))
        await asyncio.sleep(0.015)
        assert len(stage.carrier.sent) - asked == 2 * (IN_FLIGHT + 1), "two micro-steps are in flight again"
        await training

    play(story)


def test_a_slot_that_cannot_prepare_is_not_waited_out():
    async def story():
        stage = Stage([0, 1])
        stage.beat(1)
        stage.slots.cannot, stage.slots.prepare_s = {0: "could not prepare: its peer is gone"}, {1: 10**6}
        result = await stage.resize(0, 1, 2)
        assert (result.outcome, result.reason) == ("rolled_back", "slot 0: could not prepare: its peer is gone")
        assert result.seconds["prepare"] < stage.terms.timeout_s
        assert stage.killed == []

    play(story)


@pytest.mark.parametrize("stopped", [1, 2], ids=["one that trains", "a joiner"])
def test_a_stopped_slot_is_found_though_those_that_wait_for_it_speak_first(stopped: int):
    async def story():
        stage = Stage([0, 1])
        stage.slots.cannot = {0: f"could not prepare: slots [{stopped}] did not reply within 5 s"}
        stage.slots.prepare_s = {0: stage.terms.timeout_s, stopped: 10**6}
        began_s = clock()
        resizing = asyncio.create_task(stage.resize(0, 1, 2))
        await stage.until(Prepare)
        await asyncio.sleep(0.1)
        stage.slots.work_s = lambda number, command: 10**6 if number == stopped else 0.01
        if stopped == 1:
            with pytest.raises(TrainerLost, match="slot 1 did not prepare, and has been killed; slot 1 held"):
                await resizing
        else:
            result = await resizing
            assert (result.outcome, result.reason) == (
                "rolled_back",
                "slot 2 (train) did not prepare, and has been killed (and 1 more)",
            )
        assert stage.killed == [stopped]
        assert clock() - began_s < stage.terms.timeout_s + CAUSES_S + LOOK_S * NUM_LOOKS + 0.5

    play(story)


def test_a_slot_that_is_silent_for_a_while_is_not_killed_because_another_has_failed_at_once():
    async def story():
        stage = Stage([0, 1])
        stage.slots.cannot = {2: "could not prepare: no memory"}
        stage.slots.prepare_s = {1: 10**6}
        resizing = asyncio.create_task(stage.resize(0, 1, 2))
        await stage.until(Prepare)
        await asyncio.sleep(0.01)
        stage.slots.work_s = lambda number, command: 4.0 if number == 1 else 0.01
        result = await resizing
        assert (result.outcome, result.reason) == ("rolled_back", "slot 2 (train): could not prepare: no memory")
        assert stage.killed == []
        await stage.train()
        assert stage.slots.wrong == []

    play(story)


def test_a_slot_that_is_silent_for_a_while_is_not_killed_because_another_has_failed_before_the_deadline():
    """The wait for other causes ends after the deadline, but the failure was none of one that had waited in vain."""

    async def story():
        stage = Stage([0, 1])
        stage.slots.cannot = {2: "could not prepare: no memory"}
        stage.slots.prepare_s = {1: 10**6, 2: 4.0}
        resizing = asyncio.create_task(stage.resize(0, 1, 2))
        await stage.until(Prepare)
        await asyncio.sleep(0.05)
        stage.slots.work_s = lambda number, command: 9.0 if number == 1 else 0.01
        result = await resizing
        assert (result.outcome, stage.killed) == ("rolled_back", [])
        assert "no memory" in result.reason

    play(story)


def test_a_slot_that_failed_because_of_another_is_not_the_only_one_that_is_heard():
    async def story():
        stage = Stage([0, 1])
        stage.slots.cannot = {0: "could not prepare: slot 2 does not go on", 2: "could not prepare: no memory"}
        stage.slots.prepare_s = {2: 0.02}
        result = await stage.resize(0, 1, 2)
        slot_0, slot_2 = (
            "slot 0: could not prepare: slot 2 does not go on",
            "slot 2 (train): could not prepare: no memory",
        )
        assert result.reason == f"{slot_0}; {slot_2}"

    play(story)


def test_what_was_said_in_time_counts_though_it_is_read_after_the_deadline():
    """As after this process was suspended: what has come is read in the turn of the loop in which the wait ends."""

    async def story():
        stage = Stage([0, 1])
        stage.slots.prepare_s = dict.fromkeys((0, 1, 2), 10**6)
        resizing = asyncio.create_task(stage.resize(0, 1, 2))
        await stage.until(Prepare)
        await asyncio.sleep(stage.terms.timeout_s + GRACE_S + 0.05)
        for slot in (0, 1, 2):
            stage.slots.slots[slot].prepared = True
            stage.carrier.emit(slot, PreparationEnded(1))
        assert (await resizing).outcome == "resized"
        assert stage.killed == []

    play(story)


def test_what_a_slot_says_of_an_earlier_change_is_not_heard():
    async def story():
        stage = Stage([0, 1])
        stage.slots.prepare_s = {1: 3.0}
        resizing = asyncio.create_task(stage.resize(0))
        await asyncio.sleep(1)
        stage.carrier.emit(1, PreparationEnded(0))
        await asyncio.sleep(1)
        assert stage.sent(Freeze) == []
        assert (await resizing).outcome == "resized"
        assert stage.slots.wrong == []

    play(story)


def test_a_joiner_that_dies_after_it_has_prepared_is_not_waited_for():
    async def story():
        stage = Stage([0, 1])
        stage.slots.prepare_s = {0: 10**6}
        resizing = asyncio.create_task(stage.resize(0, 1, 2))
        await asyncio.sleep(1)
        stage.mailbox.lose(2, "slot 2 died, as asked")
        result = await resizing
        assert (result.outcome, result.reason) == ("rolled_back", "slot 2 died, as asked")
        assert sum(result.seconds.values()) < 2

    play(story)


@pytest.mark.parametrize("step", ["assign", "prepare", "freeze", "transfer", "commit"])
@pytest.mark.parametrize("how", ["cancelled", "bug"])
def test_whatever_ends_a_change_it_is_taken_back(step: str, how: str, monkeypatch: pytest.MonkeyPatch):
    async def story():
        stage = Stage([0, 1])
        transaction = Transaction(
            stage.mailbox, stage.trainer, ParallelLayout.of((1, 2)), stage.terms, stage.kill, clock
        )  # fmt: skip
        ask_all, reached = stage.mailbox.ask_all, asyncio.Event()

        async def odd(commands, *limits):
            if any(isinstance(command, STEPS[step]) for command in commands.values()):
                reached.set()
                if how == "bug":
                    raise KeyError("a bug")
            return await ask_all(commands, *limits)

        monkeypatch.setattr(stage.mailbox, "ask_all", odd)
        changing = asyncio.create_task(transaction.run())
        await reached.wait()
        if how == "cancelled":
            changing.cancel()
        with pytest.raises(KeyError if how == "bug" else asyncio.CancelledError):
            await changing
        monkeypatch.undo()
        assert stage.with_role() == [0, 1]
        assert (await stage.resize(1, 2)).outcome == "resized"
        await stage.train()
        assert stage.slots.trained == [list(range(12))]
        assert stage.slots.wrong == []

    play(story)


def test_a_change_that_is_cancelled_while_it_waits_for_the_boundary_is_taken_back():
    async def story():
        stage = Stage([0, 1])
        stage.slots.work_s = lambda number, command: 3.0 if isinstance(command, ForwardBackward) else 0.01
        training = asyncio.create_task(stage.train(12))
        await asyncio.sleep(0.1)
        resizing = asyncio.create_task(stage.resize(0, 1, 2))
        await stage.until(Prepare)
        while not all(stage.slots.slots[slot].prepared for slot in (0, 1, 2)):  # noqa: ASYNC110 (in virtual time)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert stage.sent(Freeze) == []
        resizing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resizing
        assert stage.sent(Rollback) == [0, 1, 2]
        await training
        assert (await stage.resize(0, 1, 2)).outcome == "resized"
        assert stage.slots.wrong == []

    play(story)


def test_a_resize_that_is_cancelled_twice_says_that_the_trainer_was_lost_meanwhile():
    async def story():
        stage = Stage([0, 1])
        stage.slots.work_s = lambda number, command: 2.0 if isinstance(command, Finalize | ReleaseRole) else 0.01
        resizing = asyncio.create_task(stage.resize(0))
        await stage.until(Finalize)
        resizing.cancel()
        await asyncio.sleep(0.1)
        stage.mailbox.lose(0, "slot 0 died, as asked")
        await asyncio.sleep(1)
        resizing.cancel()
        with pytest.raises(TrainerLost, match="slot 0 died, as asked"):
            await resizing

    play(story)


@pytest.mark.parametrize("after", [(0, 1, 2), (0,)], ids=["one joins", "one leaves"])
def test_a_resize_that_is_cancelled_after_its_commit_ends_first(after: tuple[int, ...]):
    async def story():
        stage = Stage([0, 1])
        stage.slots.work_s = lambda number, command: 0.5 if isinstance(command, Finalize | ReleaseRole) else 0.01
        resizing = asyncio.create_task(stage.resize(*after))
        await stage.until(Finalize)
        training = asyncio.create_task(stage.train())
        began_s = clock()
        resizing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resizing
        assert clock() - began_s >= 0.4
        assert stage.with_role() == list(after)
        await training
        assert stage.slots.wrong == []

    play(story)


def test_a_resize_that_is_cancelled_does_not_wait_long_for_a_slot_that_leaves():
    async def story():
        stage = Stage([0, 1])
        stage.terms = replace(stage.terms, timeout_s=0.5)
        stage.slots.work_s = lambda number, command: 60.0 if isinstance(command, ReleaseRole) else 0.01
        resizing = asyncio.create_task(stage.resize(0))
        await stage.until(ReleaseRole)
        began_s = clock()
        resizing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resizing
        assert 1.0 < clock() - began_s < 5.0
        await stage.train()

    play(story)


def test_a_resize_that_is_cancelled_says_that_the_trainer_was_lost_meanwhile():
    async def story():
        stage = Stage([0, 1])
        stage.slots.work_s = lambda number, command: 0.5 if isinstance(command, Finalize) else 0.01
        resizing = asyncio.create_task(stage.resize(0, 1, 2))
        await stage.until(Finalize)
        resizing.cancel()
        stage.mailbox.lose(1, "slot 1 died, as asked")
        with pytest.raises(TrainerLost, match="slot 1 died, as asked"):
            await resizing

    play(story)


def test_roles_are_released_once_all_is_prepared_and_a_part_that_is_not_does_not_end_the_resize():
    release = Release((), (generator(2),))

    class Releasing:
        async def release(self, asked: Release) -> list[str]:
            assert asked is release
            assert stages[0].sent(Prepare) == [0, 1, 2]
            assert all(stages[0].slots.slots[slot].prepared for slot in (0, 1, 2))
            assert stages[0].sent(Freeze) == []
            await asyncio.sleep(7)
            return ["generator-2 goes on generating"]

    stages: list[Stage] = []

    async def story():
        stage = Stage([0, 1])
        stages.append(stage)
        after = ParallelLayout.of((0, 1, 2))
        resized = await Transaction(
            stage.mailbox, stage.trainer, after, stage.terms, stage.kill, clock, release, Releasing()
        ).run()
        assert (resized.outcome, resized.not_released) == ("resized", ("generator-2 goes on generating",))
        assert resized.pause_s > resized.seconds["release"] == pytest.approx(7.0)
        assert stage.sent(Freeze) == [0, 1, 2]

    play(story)


def test_a_slot_that_cannot_give_the_role_up_is_not_kept():
    async def story():
        stage = Stage([0, 1])
        stage.carrier.fail(0, "error", on=ReleaseRole)
        assert (await stage.resize(1, 2)).outcome == "resized"
        assert stage.killed == [0]
        # What does not hold the role has nothing to give up.
        stage.carrier.fail(3, "error", on=AssignRole)
        assert (await stage.resize(1, 2, 3)).outcome == "rolled_back"
        assert stage.killed == [0]

    play(story)


@pytest.mark.parametrize(
    ("spoilt", "sentence"),
    [
        ({2: "plan"}, "slot 2 made another plan than slots 0-1,3"),
        ({1: "step"}, "slot 1 is at step 1, in the middle of a batch, after 1 update, slot 0 at step 0"),
        ({3: "bytes"}, "what arrived is not what was sent, from slot 3 to 0, 3 to 1, 3 to 2"),
    ],
)
def test_slots_that_do_not_agree_do_not_change(spoilt: dict[int, str], sentence: str):
    async def story():
        stage = Stage([0, 1])
        stage.slots.spoil = spoilt
        result = await stage.resize(0, 1, 2, 3)
        assert (result.outcome, result.reason[: len(sentence)]) == ("rolled_back", sentence)
        assert (stage.sent(Rollback), stage.sent(ReleaseRole)) == ([0, 1, 2, 3], [2, 3])
        assert stage.sent(Commit) == []
        stage.slots.spoil = {}
        await stage.train()
        assert stage.slots.wrong == []

    play(story)


@pytest.mark.parametrize(
    ("step", "outcome"), [("freeze", "rolled_back"), ("commit", "resized"), ("finalize", "resized")]
)
def test_a_reply_of_the_wrong_class_is_a_refusal(step: str, outcome: str):
    async def story():
        stage = Stage([0, 1])
        respond = stage.slots.respond

        async def odd(slot, command):
            reply = await respond(slot, command)
            return ForwardBackwardDone(1, 0.0) if isinstance(command, STEPS[step]) else reply

        stage.carrier._slots[0] = odd
        result = await stage.resize(1, 2)
        assert result.outcome == outcome
        if outcome == "rolled_back":
            assert result.reason == "slot 0 replied to Freeze with ForwardBackwardDone"
        await stage.train()
        assert stage.slots.trained == [list(range(12))]

    play(story)


def test_without_the_old_state_a_change_that_moves_cannot_be_taken_back():
    async def story():
        stage = Stage([0, 1], keeps_old=False)
        stage.carrier.fail(2, "death", on=TransferState)
        with pytest.raises(TrainerLost, match="slot 2 died, as asked; the old state was given up while it moved"):
            await stage.resize(1, 2)

    play(story)


def test_a_slot_that_cannot_take_back_ends_the_trainer():
    async def story():
        stage = Stage([0, 1])
        stage.carrier.fail(2, "death", on=TransferState)
        stage.carrier.fail(1, "error", on=Rollback)
        lost = r"slot 2 died, as asked; .*Rollback failed, as asked; slot 1 held 1 of 2"
        with pytest.raises(TrainerLost, match=lost):
            await stage.resize(0, 2)
        assert stage.sent(Done) == []

    play(story)


LAYOUTS = st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True).map(tuple)
FAULTS = st.none() | st.tuples(
    st.sampled_from(["death", "error", "drop", "duplicate"]), st.sampled_from(sorted(STEPS)), st.integers(0, 5)
)


@settings(max_examples=examples(200), deadline=None)
@given(
    first=LAYOUTS,
    batches=st.lists(st.lists(st.integers(2, SEQ_LEN), max_size=30), min_size=1, max_size=4),
    resizes=st.lists(st.tuples(st.floats(0, 0.2), LAYOUTS, FAULTS), max_size=6),
)
def test_whatever_happens_each_sample_is_trained_exactly_once(first, batches, resizes):
    async def story():
        stage = Stage(first, num_slots=6)

        async def train():
            for number, lengths in enumerate(batches):
                await stage.trainer.forward_backward([sample(n, k) for n, k in enumerate(lengths)], SEQ_LEN)
                await stage.trainer.optim_step(float(number + 1))

        async def resize():
            for wait_s, members, fault in resizes:
                await asyncio.sleep(wait_s)
                if stage.mailbox.lost.keys() & set(members):
                    continue
                if fault:
                    kind, step, slot = fault
                    stage.carrier.fail(slot, kind, on=STEPS[step])
                await stage.resize(*members)

        training, resizing = asyncio.create_task(train()), asyncio.create_task(resize())
        results = await asyncio.gather(training, resizing, return_exceptions=True)
        assert stage.slots.wrong == []
        errors = [result for result in results if result is not None]
        assert all(isinstance(error, TrainerLost | SlotLost) for error in errors), errors
        trained = [list(range(len(lengths))) for lengths in batches]
        if errors:
            # Nobody goes on with a part of the state missing; what was done until then is right.
            assert set(stage.mailbox.lost).intersection(stage.trainer.layout.slots)
            whole = stage.slots.trained[:-1]  # of the last step, some slots may have heard and others not
            assert whole == trained[: len(whole)]
        else:
            assert stage.slots.trained == trained
            members = [stage.slots.slots[slot].live for slot in stage.trainer.layout.slots]
            assert [member.step for member in members if member] == [len(batches)] * len(members)

    play(story)
