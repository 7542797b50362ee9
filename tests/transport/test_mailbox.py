"""What asking means, on both carriers."""

import asyncio
import re
import time

import pytest

from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.messages.workers import (
    AssignRole,
    Command,
    Done,
    EngineStats,
    Failed,
    Heartbeat,
    OptimStep,
    Ping,
    Publish,
    Published,
    Reply,
)
from ductile.records import Manifest
from ductile.roles import REFUSALS, Late, Refused, SlotLost
from ductile.transport.mailbox import Died, Mailbox
from tests.orchestrator.doubles import run as on_virtual_time
from tests.transport.memory_transport import MemoryTransport
from tests.transport.transports import eventually, memory_slots, socket_slots

MANIFEST = Manifest(3, "shared_memory", "/proc/1/fd/3", 0, 0, ())
STATS = EngineStats(num_running=1, num_waiting=0, num_tokens=5, num_preempted=0, cache_used=0.5, version=2)


@pytest.fixture(params=[memory_slots, socket_slots], ids=["memory", "sockets"])
def slots(request: pytest.FixtureRequest):
    return request.param


def respond(slot: int, command: Command) -> Reply | None:
    match command:
        case Ping():
            return Done()
        case Publish(version):
            return Published(MANIFEST if slot == 0 else None) if version == 3 else Failed("no such version", "line 7")
        case _:
            return None


def run(story) -> None:
    asyncio.run(asyncio.wait_for(story, 100))


def test_each_command_gets_its_reply(slots):
    async def story():
        async with slots({0: respond, 1: respond}) as (mailbox, _):
            replies = await asyncio.gather(*(mailbox.ask(n % 2, Publish(3), 5) for n in range(50)))
            assert replies == [Published(MANIFEST if n % 2 == 0 else None) for n in range(50)]

    run(story())


def test_a_failure_is_refused_with_the_slots_words(slots):
    async def story():
        async with slots({0: respond}) as (mailbox, _):
            with pytest.raises(Refused, match=r"slot 0.*: no such version") as raised:
                await mailbox.ask(0, Publish(1), 5)
            assert raised.value.__notes__ == ["line 7"]

    run(story())


def test_silence_is_late_and_says_what_the_slot_was_doing(slots):
    async def story():
        async with slots({0: respond}) as (mailbox, emit):
            emit[0](Heartbeat("AssignRole", 12.0))
            await eventually(lambda: mailbox.heartbeats)
            with pytest.raises(
                Late, match=r"slot 0.* did not reply to OptimStep within 0.05 s; .*busy with AssignRole for 12 s"
            ):
                await mailbox.ask(0, OptimStep(1.0), 0.05)
            assert await mailbox.ask(0, Ping(), 5) == Done()

    run(story())


def test_a_reply_after_the_deadline_is_counted_and_harms_nobody(slots):
    def slow(slot: int, command: Command) -> Reply:
        if isinstance(command, OptimStep):
            time.sleep(0.2)
        return Done()

    async def story():
        async with slots({0: slow}) as (mailbox, _):
            if slots is memory_slots:
                pytest.skip(
                    "a handler that blocks blocks the memory transport's loop; test_memory_transport delays instead"
                )
            with pytest.raises(Late):
                await mailbox.ask(0, OptimStep(1.0), 0.05)
            assert await mailbox.ask(0, Ping(), 5) == Done()
            assert mailbox.unused == {"Done": 1}

    run(story())


def test_a_lost_slot_fails_everything_asked_of_it_at_once(slots):
    async def story():
        async with slots({0: respond, 1: respond}) as (mailbox, _):
            events = []
            mailbox.subscribe(lambda slot, event: events.append((slot, event)))
            asking = [asyncio.create_task(mailbox.ask(1, OptimStep(1.0), 60)) for _ in range(3)]
            other = asyncio.create_task(mailbox.ask(0, OptimStep(1.0), 0.3))
            await asyncio.sleep(0.05)
            mailbox.lose(1, "slot 1 was killed by SIGKILL")
            mailbox.lose(1, "a later reason")
            for task in asking:
                with pytest.raises(SlotLost, match="slot 1 was killed by SIGKILL"):
                    await task
            with pytest.raises(SlotLost, match="killed by SIGKILL"):
                await mailbox.ask(1, Ping(), 5)
            with pytest.raises(Late):
                await other
            assert events == [(1, Died("slot 1 was killed by SIGKILL"))]

    run(story())


def test_asking_all_gives_one_outcome_a_target(slots):
    async def story():
        async with slots({0: respond, 1: respond, 2: respond, 3: respond}) as (mailbox, _):
            mailbox.lose(2, "slot 2 is gone")
            outcomes = await mailbox.ask_all({0: Ping(), 1: Publish(1), 2: Ping(), 3: OptimStep(1.0)}, 0.2)
            assert list(outcomes) == [0, 1, 2, 3]
            assert outcomes[0] == Done()
            assert [type(outcomes[slot]) for slot in (1, 2, 3)] == [Refused, SlotLost, Late]

    run(story())


def test_after_a_failure_the_others_are_not_waited_for(slots):
    async def story():
        async with slots({0: respond, 1: respond}) as (mailbox, _):
            outcomes = await mailbox.ask_all({0: OptimStep(1.0), 1: Publish(1)}, 600, after_failure_s=0.05)
            assert isinstance(outcomes[1], Refused)
            assert isinstance(outcomes[0], Late)
            assert "had not replied to OptimStep when another slot failed" in str(outcomes[0])

    run(story())


def test_replies_after_a_failure_do_not_make_the_wait_longer():
    async def story():
        carrier = MemoryTransport(dict.fromkeys(range(4), respond))
        carrier.fail(1, "delay", delay_s=1.5)
        carrier.fail(2, "delay", delay_s=3.0)
        outcomes = await Mailbox(carrier).ask_all(
            {0: Publish(1), 1: Ping(), 2: Ping(), 3: OptimStep(1.0)}, 600, after_failure_s=2.0
        )
        assert [type(outcome) for outcome in outcomes.values()] == [Refused, Done, Late, Late]
        await asyncio.sleep(2)  # the delayed reply, which nobody waits for

    on_virtual_time(story())


def test_a_cancelled_request_is_forgotten(slots):
    async def story():
        async with slots({0: respond}) as (mailbox, _):
            task = asyncio.create_task(mailbox.ask(0, OptimStep(1.0), 60))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            mailbox.lose(0, "gone")
            assert not mailbox._pending

    run(story())


def test_events_reach_every_listener_until_it_leaves(slots):
    async def story():
        async with slots({0: respond, 1: respond}) as (mailbox, emit):
            heard: list = []
            leave = mailbox.subscribe(lambda slot, event: heard.append((slot, event)))
            mailbox.subscribe(lambda slot, event: heard.append("second"))
            emit[1](STATS)
            await eventually(lambda: len(heard) == 2)
            assert heard == [(1, STATS), "second"]
            leave()
            emit[1](STATS)
            await eventually(lambda: len(heard) == 3)
            assert heard[2:] == ["second"]

    run(story())


def test_a_listener_that_raises_is_told_of_and_stops_nobody(slots):
    async def story():
        async with slots({0: respond}) as (mailbox, emit):
            told, heard = [], []
            mailbox._on_error = lambda sentence, error: told.append((sentence, error))
            mailbox.subscribe(lambda slot, event: {}["books"])
            mailbox.subscribe(lambda slot, event: heard.append(event))
            emit[0](STATS)
            await eventually(lambda: heard)
            [(sentence, error)] = told
            assert re.fullmatch(r"what slot 0.* said \(EngineStats\) could not be taken in", sentence)
            assert isinstance(error, KeyError)
            assert await mailbox.ask(0, Ping(), 5) == Done()

    run(story())


def test_sentences_name_the_roles_of_a_slot(slots):
    async def story():
        async with slots({0: lambda slot, command: Done()}) as (mailbox, _):
            await mailbox.ask(0, AssignRole("generate", {}, ParallelLayout.of((0,))), 5)
            await mailbox.ask(0, AssignRole("score", {}, ParallelLayout.of((0,))), 5)
            assert mailbox.describe(0).startswith("slot 0 (generate, score")

    run(story())


def test_time_since_a_slot_spoke(slots):
    async def story():
        async with slots({0: respond}) as (mailbox, _):
            await mailbox.ask(0, Ping(), 5)
            heard = mailbox.heard_at_s[0]
            mailbox._clock = lambda: heard + 7.5
            assert mailbox.silent_for_s(0) == pytest.approx(7.5)

    run(story())


def test_a_slot_that_comes_again_is_a_stranger(slots):
    async def story():
        async with slots({0: lambda slot, command: Done()}) as (mailbox, _):
            await mailbox.ask(0, AssignRole("train", {}, ParallelLayout.of((0,))), 5)
            assert mailbox.roles(0) == ("train",)
            mailbox.lose(0, "slot 0 was killed")
            mailbox.welcome(0)
            assert (mailbox.roles(0), mailbox.lost, mailbox.silent_for_s(0)) == ((), {}, 0.0)
            assert mailbox.describe(0) == "slot 0"
            assert await mailbox.ask(0, AssignRole("score", {}, ParallelLayout.of((0,))), 5) == Done()
            assert mailbox.roles(0) == ("score",)

    run(story())


@pytest.mark.parametrize("kind", [*REFUSALS.values()])
def test_a_refusal_has_the_class_on_both_sides_of_the_wire(slots, kind):
    async def story():
        async with slots({0: lambda slot, command: Failed("no", code=kind.code)}) as (mailbox, _):
            with pytest.raises(Refused, match=r"slot 0.*: no") as raised:
                await mailbox.ask(0, Ping(), 5)
            assert type(raised.value) is kind

    run(story())


def test_a_refusal_of_a_code_that_is_not_known_is_a_refusal(slots):
    async def story():
        async with slots({0: lambda slot, command: Failed("no", code="of tomorrow")}) as (mailbox, _):
            with pytest.raises(Refused) as raised:
                await mailbox.ask(0, Ping(), 5)
            assert type(raised.value) is Refused

    run(story())
