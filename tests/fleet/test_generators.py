"""Generators over the memory transport: where sequences go, what cancelling, silence and death do."""

import asyncio
import gc
import tracemalloc
from collections.abc import Collection

import pytest

from ductile.config.schema.cluster import ClusterConfig
from ductile.fleet.requests.generators import NOT_TAKEN_S, RemoteGenerators
from ductile.fleet.requests.in_flight import RequestsInFlight
from ductile.fleet.requests.instance_port import RoleSlots
from ductile.messages.workers import Abort, Command, Done, EngineStats, Finished, Generate, Heartbeat, Reply
from ductile.records import GenerateRequest, Generation, Sampling
from ductile.roles import Late, NotTaken, Refused, SlotLost
from ductile.sim.clock import VirtualTimeLoop, now_s
from ductile.sim.clock import run as in_virtual_time
from ductile.transport.deadlines import Deadlines
from ductile.transport.mailbox import Mailbox
from tests.fleet.generate_slots import generator
from tests.transport.memory_transport import MemoryTransport


def request(name: str, group: str = "", max_tokens: int = 10) -> GenerateRequest:
    return GenerateRequest(name, (1, 2), Sampling(max_tokens=max_tokens), group=group)


def finished(name: str, num_tokens: int = 2, reason="stop") -> Finished:
    return Finished((Generation(name, (7,) * num_tokens, (0.0,) * num_tokens, (0,) * num_tokens, reason),))


def stats(num_tokens: int) -> EngineStats:
    return EngineStats(1, 0, num_tokens, 0, 0.1, 0)


class Fleet:
    """Two generators that complete nothing by themselves."""

    def __init__(self, timeout_s: float = 5.0, block_tokens: int = 16, needed: Collection[int] = ()) -> None:
        self.carrier = MemoryTransport({0: self._respond, 1: self._respond})
        self.mailbox = Mailbox(self.carrier)
        self.generators = RemoteGenerators(
            RoleSlots(self.mailbox, "generate", timeout_s, is_needed=lambda slot: slot in needed),
            map(generator, (0, 1)),
            8,
            block_tokens,
            Deadlines.same(timeout_s),
        )

    def _respond(self, slot: int, command: Command) -> Reply:
        return Done()

    def ask(self, *args, **kwargs) -> "asyncio.Task[Generation]":
        return asyncio.create_task(self.generators.generate(request(*args, **kwargs)))

    def sent(self, kind: type) -> list:
        return [(slot, command) for slot, command in self.carrier.sent if isinstance(command, kind)]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def ended(*tasks: "asyncio.Task[Generation]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await settle()


def run(story) -> None:
    asyncio.run(asyncio.wait_for(story, 100))


def test_a_completion_goes_to_who_asked():
    async def story():
        fleet = Fleet()
        first, second = fleet.ask("a"), fleet.ask("b")
        await settle()
        fleet.carrier.emit(1, finished("b"))
        fleet.carrier.emit(0, finished("a", 3, "length"))
        assert (await first).finish_reason == "length"
        assert (await second).id == "b"
        assert fleet.generators.capacity == 16
        assert [load.remaining_tokens for load in fleet.generators._in_flight.loads(fleet.generators.instances)] == [
            0,
            0,
        ]

    run(story())


def test_one_message_a_slot_and_turn():
    async def story():
        fleet = Fleet()
        for n in range(6):
            fleet.ask(str(n), max_tokens=10 + n)
        await settle()
        sent = fleet.sent(Generate)
        assert sorted(slot for slot, _ in sent) == [0, 1]
        assert sorted(r.id for _, command in sent for r in command.requests) == list("012345")

    run(story())


def test_goes_where_fewest_tokens_are_left_and_siblings_together():
    async def story():
        fleet = Fleet()
        fleet.ask("long", max_tokens=1000)
        fleet.ask("s0", group="s", max_tokens=20)
        fleet.ask("s1", group="s", max_tokens=20)
        fleet.ask("other", max_tokens=20)
        await settle()
        where = {r.id: slot for slot, command in fleet.sent(Generate) for r in command.requests}
        assert where == {"long": 0, "s0": 1, "s1": 1, "other": 1}

    run(story())


@pytest.mark.parametrize(("block_tokens", "together"), [(2, True), (3, False), (0, False)])
def test_siblings_go_together_where_the_cache_shares_their_prompt(block_tokens: int, together: bool):
    """Of two tokens, as all prompts here. 0: nothing is shared."""

    async def story():
        fleet = Fleet(block_tokens=block_tokens)
        fleet.ask("s0", group="s")
        fleet.ask("s1", group="s")
        await settle()
        slots = [slot for slot, command in fleet.sent(Generate) for _ in command.requests]
        assert slots == ([0, 0] if together else [0, 1])

    run(story())


def test_cancelling_aborts():
    async def story():
        fleet = Fleet()
        tasks = [fleet.ask(name) for name in "abcd"]
        await settle()
        for task in tasks[:3]:
            task.cancel()
        await asyncio.wait(tasks[:3])
        await settle()
        aborted = {name for _, command in fleet.sent(Abort) for name in command.ids}
        assert aborted == {"a", "b", "c"}
        assert len(fleet.sent(Abort)) == 2, "one message a slot"
        assert [load.remaining_tokens for load in fleet.generators._in_flight.loads(fleet.generators.instances)] == [
            0,
            10,
        ]

    run(story())


def test_the_completion_of_an_aborted_attempt_is_not_that_of_the_second():
    async def story():
        fleet = Fleet()
        first = fleet.ask("a")
        await settle()
        first.cancel()
        await settle()
        second = fleet.ask("a")
        await settle()
        fleet.carrier.emit(0, finished("a", 1, "abort"))
        await settle()
        assert not second.done()
        ((_, command),) = [pair for pair in fleet.sent(Generate) if pair[1].requests[0].id != "a"]
        fleet.carrier.emit(0, finished(command.requests[0].id, 4))
        generation = await second
        assert (generation.id, len(generation.token_ids)) == ("a", 4)

    run(story())


def test_what_is_under_way_at_a_generator_that_dies_begins_again_and_nothing_else():
    async def story():
        fleet = Fleet()
        first, second = fleet.ask("a"), fleet.ask("b")
        await settle()
        fleet.mailbox.lose(0, "slot 0 was killed by SIGKILL")
        await settle()
        assert [command.requests[0].id for slot, command in fleet.sent(Generate) if slot == 1] == ["b", "a"]
        fleet.carrier.emit(1, finished("b"))
        fleet.carrier.emit(1, finished("a"))
        assert [(await first).id, (await second).id] == ["a", "b"]

    run(story())


@pytest.mark.parametrize("num_dead", [1, 2])
def test_a_connection_that_ends_before_the_news_of_the_death_costs_one_attempt(num_dead: int):
    async def story():
        fleet = Fleet()
        dead = {0, 1} if num_dead == 2 else {0}
        attempts, post = [], fleet.carrier.post

        async def unreachable(slot, epoch, sequence, parcel):
            attempts.append(slot)
            if slot in dead:
                raise SlotLost(f"slot {slot} is not connected any more")
            await post(slot, epoch, sequence, parcel)

        fleet.carrier.post = unreachable
        task = fleet.ask("a")
        await settle()
        await settle()
        assert attempts == [0, 1]
        if num_dead == 1:
            fleet.carrier.emit(1, finished("a"))
            await task
        else:
            assert not task.done()
            task.cancel()
            await asyncio.wait([task])

    run(story())


def test_a_refusal_reaches_everybody_in_the_message():
    async def story():
        fleet = Fleet()
        fleet.carrier.fail(0, "error", on=Generate)
        task = fleet.ask("a")
        with pytest.raises(Refused, match="Generate failed, as asked"):
            await task

    run(story())


def test_a_generator_is_killed_only_without_any_progress():
    async def story():
        fleet = Fleet(timeout_s=20)
        task = fleet.ask("a")
        for tokens in (5, 9):
            await asyncio.sleep(15)
            fleet.carrier.emit(0, stats(tokens))
        await asyncio.sleep(15)
        fleet.carrier.emit(0, stats(9))
        assert not fleet.mailbox.lost
        await asyncio.sleep(8)
        assert fleet.sent(Generate)[-1][0] == 1, "it begins again at the other generator"
        said = "slot 0 made no progress for 20 s (cluster.progress_timeout_s) while it had to generate a"
        assert fleet.mailbox.lost == {0: f"{said}; it has been killed"}
        await ended(task)

    in_virtual_time(story())


def test_a_generator_on_a_slot_that_the_run_depends_on_is_late_and_not_killed():
    async def story():
        fleet = Fleet(timeout_s=20, needed={0})
        with pytest.raises(Late, match=r"slot 0 made no progress for 20 s .* while it had to generate a"):
            await fleet.ask("a")
        assert fleet.mailbox.lost == {}
        await settle()

    in_virtual_time(story())


@pytest.mark.parametrize(("what", "is_killed"), [("ForwardBackward", False), ("Score", False), ("Abort", True)])
def test_time_in_which_the_slot_works_for_another_role_does_not_count(what: str, is_killed: bool):
    async def story():
        fleet = Fleet(timeout_s=20)
        task = fleet.ask("a")
        for second in range(60):
            await asyncio.sleep(1)
            fleet.carrier.emit(0, Heartbeat(what, second + 1.0))
        assert (0 in fleet.mailbox.lost) == is_killed
        await ended(task)

    in_virtual_time(story())


@pytest.mark.parametrize("stopped_after_s", [1, 2, 19])
def test_generators_live_on_when_the_orchestrator_itself_is_suspended(stopped_after_s: int):
    """What they said meanwhile is read a message a turn, after the timers that have become due."""

    async def story():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        fleet = Fleet(timeout_s=20)
        tasks = [fleet.ask(name) for name in "ab"]
        for tokens in range(1, stopped_after_s + 1):
            await asyncio.sleep(1)
            for slot in (0, 1):
                fleet.carrier.emit(slot, stats(tokens))
        loop._files.slept_s += 600
        await asyncio.sleep(15)
        assert fleet.mailbox.lost == {}
        await asyncio.sleep(10)
        assert set(fleet.mailbox.lost) == {0, 1}, "they have said nothing since"
        await ended(*tasks)

    in_virtual_time(story())


def test_a_request_that_has_ended_leaves_nothing_behind():
    async def story():
        requests = RequestsInFlight(lambda: 0.0)

        def fly(number: int) -> None:
            requests.close(requests.open(request(f"train/0/{number}")), aborted=False)

        fly(0)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(2000):
            fly(number)
        gc.collect()  # of the last requests, numpy's flags are still there: as many, however many requests there were
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < 100_000  # an entry each would be 200,000; other threads may allocate some, too

    run(story())


def test_each_wait_has_a_deadline_of_its_own():
    """A generator may be silent for longer than a command may take, and requests may wait for one longer still."""

    async def story():
        fleet = Fleet()
        fleet.generators._deadlines = Deadlines(command_s=0.05, progress_s=0.2, patience_s=0.4, group_s=1.0)
        stuck = fleet.ask("a")
        await asyncio.sleep(0.15)
        assert not fleet.mailbox.lost
        await asyncio.sleep(0.1)
        assert "no progress for 0.2 s" in fleet.mailbox.lost[0]
        fleet.mailbox.lose(1, "slot was killed")
        await asyncio.sleep(0.3)
        assert not stuck.done()
        with pytest.raises(Late, match=r"for 0\.4 s no slot had the role"):
            await stuck

    in_virtual_time(story())


def test_deadlines_that_are_not_written_follow_from_the_others():
    assert Deadlines.of(ClusterConfig(command_timeout_s=9)) == Deadlines(9, 9, 9, 18)
    assert Deadlines.of(ClusterConfig(command_timeout_s=9, progress_timeout_s=20)) == Deadlines(9, 20, 9, 40)
    written = ClusterConfig(command_timeout_s=9, progress_timeout_s=1, patience_timeout_s=2, group_timeout_s=30)
    assert Deadlines.of(written) == Deadlines(9, 1, 2, 30)


def test_a_request_that_is_not_taken_is_sent_again_a_moment_later_and_counts_as_no_loss():
    async def story():
        fleet, told = Fleet(), list[str]()
        fleet.generators.on_restarted.add(lambda sentence, instance: told.append(sentence))
        for slot in (0, 1):
            fleet.carrier.fail(slot, "error", on=Generate, times=4, code="not_taken")
        task = fleet.ask("a")
        await asyncio.sleep(4.5 * NOT_TAKEN_S)
        assert [slot for slot, _ in fleet.sent(Generate)] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
        assert fleet.generators._in_flight.get("a").num_lost == 0
        assert len(told) == 1, "of a row of them the first"
        await ended(task)

    in_virtual_time(story())


def test_a_generator_that_takes_no_requests_is_passed_over_for_a_busy_one():
    async def story():
        fleet = Fleet()
        fleet.carrier.fail(0, "error", on=Generate, times=99, code="not_taken")
        tasks = [fleet.ask(f"busy {number}", max_tokens=1000) for number in range(4)]
        await settle()
        tasks += [fleet.ask(f"new {number}") for number in range(4)]
        await settle()
        taken = {each.id for slot, command in fleet.sent(Generate) if slot == 1 for each in command.requests}
        assert len(taken) == 8, "at once, and not a moment later"
        await ended(*tasks)

    in_virtual_time(story())


def test_a_request_that_none_takes_fails_when_patience_ends():
    async def story():
        fleet = Fleet(timeout_s=20)
        for slot in (0, 1):
            fleet.carrier.fail(slot, "error", on=Generate, times=10_000, code="not_taken")
        began_s = now_s()
        with pytest.raises(NotTaken):
            await fleet.ask("a")
        assert now_s() - began_s == pytest.approx(20, abs=1)

    in_virtual_time(story())


def test_an_error_that_is_no_failure_ends_the_request():
    async def story():
        fleet = Fleet()

        async def ask(instance, command):
            raise ValueError("a frame of 300 MiB")

        fleet.generators.ask = ask
        with pytest.raises(ValueError, match="300 MiB"):
            await fleet.ask("a")

    run(story())
