"""A weight update at the trainer's ranks, over the memory transport: begun, sent, finished, and what waits for it."""

import asyncio

import pytest

from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.fleet.trainer.sending import SAYS_S
from ductile.messages.outgoing_updates import BeginUpdate, FinishUpdate, UpdateBegun, UpdateSent
from ductile.messages.updates import Offer, Receiver, SendReport, WeightUpdate
from ductile.messages.workers import Command, Done, Failed, OptimStep, Reply
from ductile.roles import Late, Refused, SlotLost, TrainerLost
from ductile.transport.deadlines import Deadlines
from ductile.transport.mailbox import Mailbox
from tests.fleet.train_slots import TrainSlots, play, sample
from tests.orchestrator.doubles import clock
from tests.transport.memory_transport import MemoryTransport

LAYOUT = ParallelLayout.of((0, 1, 2))


def update(version: int, total_timeout_s: float = 30.0) -> WeightUpdate:
    return WeightUpdate(f"u{version}", 1, version, (Receiver("http-1", "http"),), total_timeout_s=total_timeout_s)


class Rig:
    """Ranks that send for `send_s[slot]` seconds each: None for ever."""

    def __init__(self) -> None:
        self.slots = TrainSlots(LAYOUT, 3)
        self.transport = MemoryTransport(dict.fromkeys(LAYOUT.slots, self.respond))
        self.mailbox = Mailbox(self.transport, clock)
        self.trainer = RemoteTrainer(self.mailbox, LAYOUT, Deadlines.same(100))
        self.send_s: dict[int, float | None] = {0: 1.0, 1: 2.0, 2: 3.0}
        self.cannot: set[int] = set()
        self.at: list[tuple[str, int, float]] = []
        """(class of the command, slot, time)"""

    async def respond(self, slot: int, command: Command) -> Reply:
        self.at.append((type(command).__name__, slot, clock()))
        match command:
            case BeginUpdate(order):
                if slot in self.cannot:
                    return Failed("no memory for a ring")
                if (send_s := self.send_s[slot]) is not None:
                    report = SendReport(order.update_id, f"slot-{slot}", "0" * 13, 8, send_s)
                    loop = asyncio.get_running_loop()
                    loop.call_later(send_s, self.transport.emit, slot, UpdateSent(report))
                return UpdateBegun(Offer(f"slot-{slot}", (), (), "here"))
            case FinishUpdate():
                return Done()
            case _:
                return await self.slots.respond(slot, command)

    def times(self, command: type[Command]) -> list[float]:
        return [when_s for name, _, when_s in self.at if name == command.__name__]


def test_the_ranks_send_beside_training_and_the_step_waits_for_all() -> None:
    async def story() -> None:
        rig = Rig()
        offers = await rig.trainer.begin_update(update(1))
        assert [offer.sender for offer in offers] == ["slot-0", "slot-1", "slot-2"]
        await rig.trainer.forward_backward([sample(0, 4)], 10)
        assert clock() < 0.5, "training goes on"
        step = asyncio.create_task(rig.trainer.optim_step(1.0))
        reports = await rig.trainer.sent("u1")
        assert [report.sender for report in reports] == ["slot-0", "slot-1", "slot-2"]
        await step
        assert min(rig.times(OptimStep)) == pytest.approx(3.0, abs=0.01), "the slowest rank's end"
        await rig.trainer.finish_update("u1", aborted=False)
        await rig.trainer.finish_update("u1", aborted=False)
        assert len(rig.times(FinishUpdate)) == 3, "once"

    play(story)


def test_a_rank_that_leaves_the_trainer_after_it_has_sent_is_not_told_of_the_end() -> None:
    async def story() -> None:
        rig = Rig()
        await rig.trainer.begin_update(update(1))
        await rig.trainer.sent("u1")
        async with rig.trainer.boundary(moves_weights=True):
            rig.trainer.go_on_in(ParallelLayout.of((0, 1)), 1)
        await rig.trainer.finish_update("u1", aborted=False)
        assert [slot for name, slot, _ in rig.at if name == "FinishUpdate"] == [0, 1]

    play(story)


def test_an_update_that_is_aborted_lets_the_step_go_at_once() -> None:
    async def story() -> None:
        rig = Rig()
        rig.send_s = dict.fromkeys(rig.send_s, None)
        await rig.trainer.begin_update(update(1))
        await rig.trainer.forward_backward([sample(0, 4)], 10)
        step = asyncio.create_task(rig.trainer.optim_step(1.0))
        await asyncio.sleep(1.0)
        await rig.trainer.finish_update("u1", aborted=True)
        await step
        assert clock() < 1.1

    play(story)


def test_a_rank_that_says_nothing_holds_the_trainer_no_longer_than_the_update_may_take() -> None:
    async def story() -> None:
        rig = Rig()
        rig.send_s[1] = None
        await rig.trainer.begin_update(update(1, total_timeout_s=8.0))
        await rig.trainer.forward_backward([sample(0, 4)], 10)
        step = asyncio.create_task(rig.trainer.optim_step(1.0))
        with pytest.raises(Late, match="slot 1 did not send its weights within 8 s"):
            await rig.trainer.sent("u1")
        await step
        assert clock() == pytest.approx(8.0 + SAYS_S, abs=0.1)

    play(story)


def test_a_rank_that_dies_in_an_update_is_known_at_once() -> None:
    async def story() -> None:
        rig = Rig()
        await rig.trainer.begin_update(update(1))
        waiting = asyncio.create_task(rig.trainer.sent("u1"))
        await asyncio.sleep(1.5)  # the first rank is through
        rig.mailbox.lose(0, "slot 0 has ended")
        rig.mailbox.lose(2, "slot 2 was killed")
        with pytest.raises(SlotLost, match="slot 2 was killed"):
            await waiting
        assert clock() == pytest.approx(1.5, abs=0.1)
        await rig.trainer.finish_update("u1", aborted=True)
        assert [slot for name, slot, _ in rig.at if name == "FinishUpdate"] == [1], "those that live"

    play(story)


def test_a_trainer_that_is_given_up_in_an_update_ends_it_with_its_own_sentence() -> None:
    async def story() -> None:
        rig = Rig()
        await rig.trainer.begin_update(update(1))
        waiting = asyncio.create_task(rig.trainer.sent("u1"))
        await asyncio.sleep(0.5)
        rig.trainer.lose(TrainerLost("slot 1 did not reply to ForwardBackward"))
        with pytest.raises(TrainerLost, match="ForwardBackward"):
            await waiting
        assert clock() == pytest.approx(0.5, abs=0.1)

    play(story)


def test_when_one_rank_cannot_begin_none_goes_on() -> None:
    async def story() -> None:
        rig = Rig()
        rig.cannot = {1}
        with pytest.raises(Refused, match="no memory for a ring"):
            await rig.trainer.begin_update(update(1))
        assert len(rig.times(FinishUpdate)) == 3
        with pytest.raises(Refused, match="no weight update u1 is under way"):
            await rig.trainer.sent("u1")

    play(story)


def test_a_version_that_the_weights_are_no_more_is_not_sent() -> None:
    async def story() -> None:
        rig = Rig()
        await rig.trainer.begin_update(update(3))
        await rig.trainer.finish_update("u3", aborted=True)
        await rig.trainer.begin_update(update(3))  # again, to those that are left
        await rig.trainer.finish_update("u3", aborted=False)
        await rig.trainer.forward_backward([sample(0, 4)], 10)
        await rig.trainer.optim_step(1.0)
        with pytest.raises(Refused, match="the trainer has gone on from version 3"):
            await rig.trainer.begin_update(update(3))
        await rig.trainer.begin_update(update(4))

    play(story)


def test_where_a_step_learns_nothing_the_version_before_is_still_sent() -> None:
    """It is the same weights, and servers may not have it yet when the next one is published."""

    async def story() -> None:
        rig = Rig()
        await rig.trainer.publish(3)
        await rig.trainer.optim_step(0.0)
        await rig.trainer.publish(4)
        await rig.trainer.begin_update(update(3))
        await rig.trainer.finish_update("u3", aborted=False)
        assert rig.trainer.version == 4
        await rig.trainer.begin_update(update(4))

    play(story)
