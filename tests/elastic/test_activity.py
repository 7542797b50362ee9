import asyncio
from typing import get_args

from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.elastic.activity import ACTIVITIES, SlotActivity
from ductile.elastic.situation import Situation
from ductile.messages.workers import (
    AssignRole,
    BeginTrace,
    Command,
    Done,
    EndTrace,
    EngineStats,
    Generate,
    OptimStep,
    Ping,
    ReleaseRole,
    Stop,
    Survey,
)
from ductile.records import GenerateRequest, Sampling
from ductile.transport.mailbox import Mailbox
from tests.transport.memory_transport import MemoryTransport


class Seen:
    def __init__(self) -> None:
        self.told: list[tuple[int, tuple[str, ...], str]] = []

    def on_slot(self, roles, account) -> None:
        doing = account.slot, roles, account.activity
        if self.told[-1:] != [doing]:
            self.told.append(doing)


def stats(running: int) -> EngineStats:
    return EngineStats(running, 0, 5, 0, 0.0, 0)


def test_commands_and_engines_make_activities():
    async def story():
        now_s = 0.0

        def respond(slot, command):
            nonlocal now_s
            now_s += 2.0
            return Done()

        carrier = MemoryTransport({0: respond, 1: respond})
        mailbox, view = Mailbox(carrier), Seen()
        activity = SlotActivity(mailbox, lambda: now_s)
        activity.on_slot.add(view.on_slot)
        await mailbox.ask(0, AssignRole("train", {}, ParallelLayout.of((0,))), 1)
        await mailbox.ask(1, AssignRole("generate", {}, ParallelLayout.of((1,))), 1)
        await mailbox.ask(0, OptimStep(1.0), 1)
        await mailbox.ask(1, Generate((GenerateRequest("a", (1,), Sampling()),)), 1)
        carrier.emit(1, stats(1))
        await asyncio.sleep(0)
        carrier.emit(1, stats(0))
        await asyncio.sleep(0.01)
        assert view.told == [
            (0, ("train",), "switch"),
            (0, ("train",), "idle"),
            (1, ("generate",), "switch"),
            (1, ("generate",), "idle"),
            (0, ("train",), "train"),
            (0, ("train",), "idle"),
            (1, ("generate",), "generate"),
            (1, ("generate",), "idle"),
        ]
        assert activity.account(0).totals(10.0) == {"switch": 2.0, "idle": 6.0, "train": 2.0}

    asyncio.run(story())


def test_statistics_from_before_a_request_do_not_make_its_generator_idle():
    async def story():
        now_s = 0.0
        mailbox = Mailbox(carrier := MemoryTransport({}))

        async def respond(slot, command):
            nonlocal now_s
            if isinstance(command, Generate):
                carrier.emit(0, stats(0))
                await asyncio.sleep(0)
            now_s += 1.0
            return Done()

        carrier._slots[0] = respond
        activity = SlotActivity(mailbox, lambda: now_s)
        await mailbox.ask(0, AssignRole("generate", {}, ParallelLayout.of((0,))), 1)
        await mailbox.ask(0, Generate((GenerateRequest("a", (1,), Sampling()),)), 1)
        assert activity.account(0).activity == "generate"
        carrier.emit(0, stats(1))
        await asyncio.sleep(0.01)
        assert activity.account(0).activity == "generate"
        await mailbox.ask(0, ReleaseRole("generate"), 1)
        assert activity.account(0).activity == "idle", "it went before its engine said that nothing is left"

    asyncio.run(story())


class Story:
    """Two generators, a train slot and one without a role, whose clock is moved by hand."""

    def __init__(self) -> None:
        self.now_s, self.situation, self.spans = 0.0, Situation(), []
        self.carrier = MemoryTransport(dict.fromkeys(range(4), lambda slot, command: Done()))
        self.mailbox = Mailbox(self.carrier)
        self.activity = SlotActivity(self.mailbox, lambda: self.now_s)
        self.activity.explain_by(lambda: self.situation)
        self.activity.on_span.add(self.spans.append)

    async def begin(self) -> None:
        for slot, role in ((0, "generate"), (1, "generate"), (2, "train")):
            await self.mailbox.ask(slot, AssignRole(role, {}, ParallelLayout.of((slot,))), 1)
        self.now_s = 5.0
        self.activity.begin(range(4))

    async def generate(self, slot: int) -> None:
        await self.mailbox.ask(slot, Generate((GenerateRequest("a", (1,), Sampling()),)), 1)

    async def passes(self, seconds: float, **situation: bool) -> None:
        """So much time, in which things stay as they are."""
        self.situation = Situation(**situation)
        self.activity.look_again()
        await asyncio.sleep(0)
        self.now_s += seconds

    def idle(self, slot: int) -> dict[str, float]:
        return {cause: seconds for cause, seconds in self.activity.account(slot).idle(self.now_s).items() if seconds}


def test_idle_seconds_have_the_cause_that_was_there_at_the_time():
    async def story():
        run = Story()
        await run.begin()
        await run.passes(1.0, may_start=True)
        await run.generate(0)
        await run.passes(2.0)
        run.carrier.emit(0, stats(0))
        await asyncio.sleep(0)
        await run.passes(4.0, samples_ready=True)
        await run.passes(8.0, samples_ready=True, held=True)
        assert run.idle(1) == {"queue_empty": 1.0, "tail": 2.0, "queue_full": 12.0}
        assert run.idle(2) == {"waiting_for_batch": 7.0, "held": 8.0}
        assert run.idle(3) == {"no_role": 15.0}
        assert run.activity.account(0).totals(run.now_s)["generate"] == 2.0
        assert sum(run.activity.ledger.totals(run.now_s).values()) == 4 * 15.0
        run.activity.ledger.finish(run.now_s)
        assert sum(span.seconds for span in run.spans) == 4 * 15.0
        assert min(span.start_s for span in run.spans) == 5.0, "what was before the roles were there does not count"

    asyncio.run(story())


def test_waiting_in_a_change_is_part_of_it_and_a_slot_that_generates_until_then_does_not_wait():
    async def story():
        run = Story()
        await run.begin()
        await run.generate(0)
        run.activity.changing([0, 1])
        await run.passes(3.0)
        run.activity.changing([])
        await run.passes(1.0)
        assert run.activity.account(1).totals(run.now_s) == {"idle": 1.0, "switch": 3.0}
        assert run.activity.account(0).totals(run.now_s) == {"idle": 0.0, "generate": 4.0}

    asyncio.run(story())


def test_a_slot_that_is_gone_is_lost_and_still_accounted_for():
    async def story():
        run = Story()
        await run.begin()
        await run.generate(0)
        await run.passes(1.0)
        run.mailbox.lose(0, "slot 0 was killed")
        await asyncio.sleep(0)
        await run.passes(2.0)
        assert run.idle(0) == {"lost": 2.0}

    asyncio.run(story())


def test_every_command_of_a_role_is_some_activity():
    of_the_slot = {Ping, Stop, Survey, BeginTrace, EndTrace}
    assert set(get_args(Command)) - of_the_slot == ACTIVITIES.keys()
