"""Sequences that change generators while everything may go wrong, in virtual time over the memory transport."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.core.instances.instances import Instance, InstanceId
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.orders import Migration
from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.requests.instance_port import RoleSlots
from ductile.fleet.requests.weight_offers import WeightOffers
from ductile.fleet.requests.worker_pool import MOST_LOST
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.workers import Abort, AssignRole, Forget, Generate, MigrateOut, OfferWeights, Receive
from ductile.records import GenerateRequest, Generation, Sampling
from ductile.roles import Late, Refused, SlotLost
from ductile.transport.deadlines import Deadlines
from ductile.transport.mailbox import Mailbox
from tests.core.scheduling.scenes import id_on
from tests.fleet.generate_slots import TOKEN_S, GenerateSlots, completion_of, generator
from tests.nightly import examples
from tests.orchestrator.doubles import clock, run

TRAINER = 9
TIMEOUT_S = 60.0
DEADLINES = Deadlines.same(TIMEOUT_S)


def order(name: str, source: int, target: int, with_cache: bool = False) -> Migration:
    return Migration(name, id_on(source), id_on(target), with_cache)


class Cluster:
    """Slots 0 to 3 may generate, slot 9 trains."""

    def __init__(self, generating: tuple[int, ...] = (0, 1, 2), length: Callable[[str], int] = lambda name: 20) -> None:
        self.slots = GenerateSlots(11, generating, length)
        self.carrier = self.slots.carrier
        self.mailbox = Mailbox(self.carrier, clock)
        self.carrier.on_death.add(self.mailbox.lose)
        self.trainer = RemoteTrainer(self.mailbox, ParallelLayout.of((TRAINER,)), DEADLINES)
        self.offers = WeightOffers(self.trainer)
        self.restarted: list[str] = []
        self.killed: list[int] = []
        self.needed = {TRAINER}
        self.generators = RemoteGenerators(
            RoleSlots(self.mailbox, "generate", TIMEOUT_S, self.condemn, lambda slot: slot in self.needed),
            map(generator, generating),
            8,
            16,
            DEADLINES,
            self.offers,
        )
        self.generators.on_restarted.add(lambda sentence, lost: self.restarted.append(sentence))

    def condemn(self, slot: int, sentence: str) -> None:
        self.killed.append(slot)
        self.mailbox.lose(slot, sentence)
        self.slots.kill(slot, self.mailbox)

    def ask(self, name: str, max_tokens: int = 100) -> "asyncio.Task[Generation]":
        request = GenerateRequest(name, (1, 2, 3), Sampling(max_tokens=max_tokens), group=name)
        return asyncio.create_task(self.generators.generate(request))

    async def publish(self, version: int) -> None:
        manifest = await self.trainer.publish(version)
        try:
            await self.generators.receive(manifest)
        finally:
            await self.trainer.withdraw(version)

    def where(self) -> dict[str, InstanceId]:
        return {each.id: each.instance for each in self.generators.unfinished()}

    def slot_of(self, name: str) -> int:
        """First slot of the generator that has the request."""
        return next(each.slots[0] for each in self.generators.all_instances if each.id == self.where()[name])

    def sent(self, kind: type) -> list[tuple[int, Any]]:
        return [(slot, command) for slot, command in self.carrier.sent if isinstance(command, kind)]


def with_cluster(story: Callable[[Any], Coroutine[Any, Any, None]], kind: type[Cluster] = Cluster, **keys: Any) -> None:
    """Plays it, and then looks for what nobody has taken care of."""

    async def whole() -> None:
        cluster = kind(**keys)
        decoding = asyncio.create_task(cluster.slots.decode())
        await cluster.publish(0)
        await story(cluster)
        await asyncio.sleep(5)
        decoding.cancel()
        await asyncio.sleep(2 * TIMEOUT_S)
        assert cluster.slots.wrong == []
        assert cluster.slots.leaks() == []
        assert cluster.generators.unfinished() == ()

    run(whole())


async def steps(num_tokens: int) -> None:
    """As many tokens of every request later."""
    await asyncio.sleep(num_tokens * TOKEN_S + TOKEN_S / 2)


def is_whole(generation: Generation, name: str, length: int = 20) -> bool:
    return generation.id == name and generation.token_ids == completion_of(name, length)


def test_sequences_go_on_where_they_are_handed_to_and_nobody_notices():
    async def story(cluster: Cluster):
        asked = {name: cluster.ask(name) for name in ("a", "b", "c")}
        await steps(5)
        assert cluster.where() == {"a": id_on(0), "b": id_on(1), "c": id_on(2)}
        results = await cluster.generators.migrate([order("a", 0, 1), order("b", 1, 2, with_cache=True)])
        assert [(result.instance, result.with_cache, result.why) for result in results] == [
            (id_on(1), False, ""),
            (id_on(2), True, ""),
        ]
        assert cluster.where() == {"a": id_on(1), "b": id_on(2), "c": id_on(2)}
        assert [each.generated for each in cluster.generators.unfinished()] == [5, 5, 5]
        for name, task in asked.items():
            assert is_whole(await task, name)
        assert cluster.slots.with_cache == ["b"]
        assert [(slot, command.ids) for slot, command in cluster.sent(Forget)] == [(1, ("b",))]

    with_cluster(story)


def test_one_message_a_source_and_one_a_target():
    async def story(cluster: Cluster):
        asked = [cluster.ask(str(n)) for n in range(8)]
        await steps(2)
        cluster.carrier.sent.clear()
        leaving = {name: source for name, source in cluster.where().items() if source != id_on(2)}
        await cluster.generators.migrate([Migration(name, left, id_on(2), True) for name, left in leaving.items()])
        assert sorted(slot for slot, _ in cluster.sent(MigrateOut)) == [0, 1]
        ((target, command),) = cluster.sent(Generate)
        assert target == 2
        assert len(command.requests) == len(command.caches) == len(leaving)
        await asyncio.gather(*asked)

    with_cluster(story)


def test_what_ends_meanwhile_is_finished():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(18)
        cluster.slots.delay(0, MigrateOut, 1.0)
        (result,) = await cluster.generators.migrate([order("a", 0, 1)])
        assert (result.instance, result.why) == (None, "it had ended")
        assert is_whole(await asked, "a")

    with_cluster(story)


def test_what_is_just_being_sent_can_migrate():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await asyncio.sleep(0)
        assert cluster.where() == {"a": id_on(0)}
        (result,) = await cluster.generators.migrate([order("a", 0, 1)])
        assert result.instance == id_on(1)
        assert is_whole(await asked, "a")

    with_cluster(story)


def test_orders_that_are_out_of_date_change_nothing():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(1)
        moved, unknown = await cluster.generators.migrate([order("a", 2, 1), order("x", 0, 1)])
        assert (moved.instance, moved.why) == (id_on(0), "it was at generator-0, and not at generator-2")
        assert (unknown.instance, unknown.why) == (None, "it had ended")
        assert is_whole(await asked, "a")

    with_cluster(story)


@pytest.mark.parametrize("on", [MigrateOut, Generate])
def test_aborted_on_the_way(on: type):
    async def story(cluster: Cluster):
        asked, other = cluster.ask("a"), cluster.ask("b")
        await steps(3)
        cluster.slots.delay(0 if on is MigrateOut else 2, on, 0.5)
        handing = asyncio.create_task(cluster.generators.migrate([order("a", 0, 2, with_cache=True)]))
        await asyncio.sleep(0.2)
        asked.cancel()
        again = cluster.ask("a")
        await handing
        assert is_whole(await again, "a")
        assert is_whole(await other, "b")
        assert asked.cancelled()

    with_cluster(story)


@pytest.mark.parametrize("kind", ["error", "death"])
def test_a_target_that_does_not_take_them_is_replaced(kind):
    async def story(cluster: Cluster):
        asked = [cluster.ask(name) for name in ("a", "b")]
        await steps(5)
        cluster.carrier.fail(2, kind, on=Generate)
        if kind == "death":
            cluster.slots.dead.add(2)
        (result,) = await cluster.generators.migrate([order("a", 0, 2, with_cache=True)])
        assert result.instance in (id_on(0), id_on(1))
        assert result.with_cache
        assert "slot 2" in result.why
        assert is_whole(await asked[0], "a")
        assert is_whole(await asked[1], "b")
        assert cluster.restarted == [], "nothing was lost"
        assert (cluster.generators.slots == (0, 1)) == (kind == "death")

    with_cluster(story)


def test_a_target_that_does_not_take_them_is_no_reason_to_flood_the_one_on_trial():
    async def story(cluster: Cluster):
        for slot in (1, 2, 3):
            cluster.generators.suspect(id_on(slot), "no reply")
        asked = [cluster.ask(str(n)) for n in range(8)]
        await steps(2)
        assert {*cluster.where().values()} == {id_on(0)}
        for slot in (1, 2):
            cluster.generators.suspect(id_on(slot), "")
        cluster.generators.suspect(id_on(3), "its requests failed", on_trial=True)
        cluster.carrier.fail(1, "error", on=Generate)
        results = await cluster.generators.migrate([order(str(n), 0, 1) for n in range(8)])
        assert Counter(each.instance for each in results) == {id_on(0): 4, id_on(2): 3, id_on(3): 1}
        for n, task in enumerate(asked):
            assert is_whole(await task, str(n))

    with_cluster(story, generating=(0, 1, 2, 3))


def test_a_target_that_dies_as_soon_as_it_has_replied_is_replaced():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(5)

        async def die(number, command):
            reply = await cluster.slots.respond(number, command)
            if isinstance(command, Generate):
                asyncio.get_running_loop().call_soon(cluster.slots.kill, number, cluster.mailbox)
            return reply

        cluster.carrier._slots[2] = die
        (result,) = await cluster.generators.migrate([order("a", 0, 2)])
        assert result.instance in (id_on(0), id_on(1))
        assert is_whole(await asked, "a")
        assert cluster.restarted == [], "nothing was lost"

    with_cluster(story)


def test_a_target_that_is_late_is_replaced_and_told_to_stop():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(5)
        cluster.slots.delay(2, Generate, TIMEOUT_S + 1)
        (result,) = await cluster.generators.migrate([order("a", 0, 2)])
        assert result.instance in (id_on(0), id_on(1))
        assert is_whole(await asked, "a")
        await asyncio.sleep(2)
        assert (2, Abort(("a",))) in cluster.carrier.sent

    with_cluster(story)


def test_with_no_other_generator_it_goes_back_to_where_it_came_from():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(5)
        cluster.generators.drain(cluster.generators.on(0))
        cluster.carrier.fail(1, "error", on=Generate)
        (result,) = await cluster.generators.migrate([order("a", 0, 1)])
        assert result.instance == id_on(0)
        assert is_whole(await asked, "a")

    with_cluster(story, generating=(0, 1))


def test_what_nobody_takes_fails_with_what_the_last_one_said():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(5)
        for slot in (0, 1):
            cluster.carrier.fail(slot, "error", on=Generate)
        (result,) = await cluster.generators.migrate([order("a", 0, 1)])
        assert result.instance is None
        with pytest.raises(Refused, match="Generate failed, as asked"):
            await asked

    with_cluster(story, generating=(0, 1))


def test_a_source_that_refuses_keeps_them():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(5)
        cluster.carrier.fail(0, "error", on=MigrateOut)
        (result,) = await cluster.generators.migrate([order("a", 0, 1)])
        assert (result.instance, result.why) == (id_on(0), "slot 0: MigrateOut failed, as asked")
        assert is_whole(await asked, "a")

    with_cluster(story)


def test_a_source_that_dies_takes_its_tokens_along_and_they_are_sampled_anew():
    async def story(cluster: Cluster):
        first, second = cluster.ask("a"), cluster.ask("b")
        await steps(5)
        cluster.carrier.fail(0, "death", on=MigrateOut)
        cluster.slots.dead.add(0)
        (result,) = await cluster.generators.migrate([order("a", 0, 1)])
        assert result.instance is None
        assert "slot 0 died" in result.why
        assert is_whole(await first, "a")
        assert is_whole(await second, "b")
        assert cluster.restarted == ["Request a begins again: slot 0 died, as asked."]

    with_cluster(story)


def test_a_sequence_waits_for_the_successor_of_its_lone_generator():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(5)
        cluster.slots.kill(0, cluster.mailbox)
        await steps(5)
        assert not asked.done()
        assert cluster.generators.num_waiting == 1
        assert await cluster.generators.admit(generator(1), {}), "the trainer offers it the live weights"
        assert is_whole(await asked, "a")
        assert cluster.restarted == ["Request a begins again: slot 0 was killed by SIGKILL."]

    with_cluster(story, generating=(0,))


def test_the_last_generator_is_lost_between_two_optimizer_steps_and_its_successor_gets_the_weights_of_that_moment():
    async def story(cluster: Cluster):
        await cluster.publish(1)
        asked = cluster.ask("a")
        await steps(5)
        await cluster.trainer.optim_step(1.0)
        cluster.slots.kill(0, cluster.mailbox)
        assert not await cluster.generators.admit(generator(1), {}), "no slot has version 1 any more"
        manifest = await cluster.trainer.publish_again(1)
        await cluster.generators.receive(manifest)
        await cluster.trainer.withdraw(1)
        assert is_whole(await asked, "a")

    with_cluster(story, generating=(0,))


def test_weights_that_are_published_again_never_replace_later_ones():
    async def story(cluster: Cluster):
        await cluster.publish(1)
        await cluster.trainer.optim_step(1.0)
        later = await cluster.trainer.publish(2)
        assert await cluster.trainer.publish_again(1) is None
        await cluster.generators.receive(later)
        await cluster.generators.receive(replace(later, version=1))
        assert cluster.generators.version == 2
        await cluster.trainer.withdraw(2)

    with_cluster(story)


def test_a_sequence_fails_that_every_generator_is_lost_with():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(2)
        for _ in range(MOST_LOST):
            assert not asked.done()
            cluster.slots.kill(cluster.slot_of("a"), cluster.mailbox)
            await steps(1)
        said = f"slot {MOST_LOST - 1} was killed by SIGKILL; {MOST_LOST} generators were lost while they had a"
        with pytest.raises(SlotLost, match=said):
            await asked

    with_cluster(story, generating=tuple(range(MOST_LOST)))


def test_replies_that_come_twice_are_taken_once():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(5)
        for slot, command in ((0, MigrateOut), (1, Generate), (0, Forget)):
            cluster.carrier.fail(slot, "duplicate", on=command)
        await cluster.generators.migrate([order("a", 0, 1, with_cache=True)])
        assert is_whole(await asked, "a")
        assert cluster.mailbox.unused.total() == 3

    with_cluster(story)


def test_a_cancelled_caller_does_not_leave_sequences_behind():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(5)
        cluster.slots.delay(0, MigrateOut, 0.5)
        handing = asyncio.create_task(cluster.generators.migrate([order("a", 0, 1, with_cache=True)]))
        await asyncio.sleep(0.1)
        handing.cancel()
        assert is_whole(await asked, "a")
        assert cluster.sent(Forget)

    with_cluster(story)


def test_a_version_goes_live_before_a_migration_or_after_it():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(5)
        cluster.slots.delay(0, MigrateOut, 1.0)
        handing = asyncio.create_task(cluster.generators.migrate([order("a", 0, 1)]))
        await asyncio.sleep(0.1)
        publishing = asyncio.create_task(cluster.publish(1))
        await asyncio.sleep(0.5)
        assert [command.manifest.version for _, command in cluster.sent(Receive)] == [0, 0, 0]
        await handing
        await publishing
        assert {slot.version for slot in cluster.slots.slots.values() if slot.holds} == {1}
        generation = await asked
        assert is_whole(generation, "a")
        assert set(generation.versions) == {0, 1}

    with_cluster(story)


def test_a_source_that_is_late_has_given_them_away_into_nowhere():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(5)
        cluster.slots.delay(0, MigrateOut, TIMEOUT_S + 1)
        cluster.slots.length = lambda name: 10_000
        (result,) = await cluster.generators.migrate([order("a", 0, 1)])
        assert result.instance is None
        with pytest.raises(Late, match="did not reply to MigrateOut within 60 s"):
            await asked
        await asyncio.sleep(2)

    with_cluster(story)


Move = tuple[str, int, int, float]
"""What happens, to whom (twice), and how long nothing else happens then."""

HAPPENINGS = (
    *("ask", "ask", "ask", "migrate", "migrate", "migrate", "leave", "join", "publish", "train", "cancel"),
    *("kill", "delay", "delay", "duplicate", "error", "drop"),
)
SECONDS = (0.0, 0.0, 0.05, 0.25, 1.0)
moves = st.lists(
    st.tuples(st.sampled_from(HAPPENINGS), st.integers(0, 7), st.integers(0, 7), st.sampled_from(SECONDS)),
    min_size=5,
    max_size=40,
)

SPOILT = (MigrateOut, Generate, OfferWeights, AssignRole)
"""Commands that are refused or lost. Were it one that frees something, what it frees would be left over."""


class Story:
    """Carries drawn moves out, as a controller might, and keeps what each request was told."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.asked: dict[str, asyncio.Task[Generation]] = {}
        self.cancelled: set[asyncio.Task[Generation]] = set()
        self.doing: list[asyncio.Task[Any]] = []
        self.version = 0
        self.num_asked = self.num_born = 0

    def move(self, what: str, first: int, second: int) -> None:
        cluster, generators = self.cluster, self.cluster.generators
        match what:
            case "ask":
                self.num_asked += 1
                self.asked[str(self.num_asked)] = cluster.ask(str(self.num_asked))
            case "cancel" if self.asked:
                name = list(self.asked)[first % len(self.asked)]
                self.cancelled.add(self.asked[name])
                self.asked[name].cancel()
                self.asked[name] = cluster.ask(name)
            case "migrate":
                there = tuple(each.id for each in generators.all_instances if second in each.slots) or (id_on(second),)
                self._do(generators.migrate(self._migrations(lambda source: source not in there, there)))
            case "leave":
                self._do(self._leave(first))
            case "join":
                self._do(generators.admit(self._born(first), {}))
            case "publish":
                self._do(self._publish())
            case "train":
                self._do(cluster.trainer.optim_step(1.0))
            case "kill":
                cluster.slots.kill(first, cluster.mailbox)
            case "delay":
                cluster.slots.delay(
                    first, (MigrateOut, Generate, OfferWeights, Receive, AssignRole, Abort)[second % 6], 0.7
                )
            case "duplicate":
                cluster.carrier.fail(first, "duplicate")
            case "error" | "drop":
                cluster.carrier.fail(first, what, on=SPOILT[second % 4])
            case _:
                pass

    async def end(self) -> list[tuple[str, Generation | BaseException]]:
        """How each request ended. There is a generator in the end."""
        while not self.cluster.generators.slots:
            self._do(self.cluster.generators.admit(self._born(8), {}))
            await asyncio.gather(*self.doing)
            await self._publish()
        await asyncio.gather(*self.doing, *self.asked.values(), *self.cancelled, return_exceptions=True)
        return [
            (name, task.exception() or task.result()) for name, task in self.asked.items() if task not in self.cancelled
        ]

    def _born(self, slot: int) -> Instance:
        self.num_born += 1
        return generator(slot, self.num_born)

    async def _publish(self) -> None:
        self.version += 1
        await self.cluster.publish(self.version)

    async def _leave(self, slot: int) -> None:
        generators = self.cluster.generators
        if instance := generators.on(slot):
            generators.drain(instance)
        for each in [each for each in generators.all_instances if slot in each.slots]:
            there = tuple(other.id for other in generators.instances)
            await generators.migrate(self._migrations(lambda source, left=each.id: source == left, there))
            await generators.dismiss(each)

    def _migrations(self, of: Callable[[InstanceId], bool], targets: tuple[InstanceId, ...]) -> list[Migration]:
        where = sorted((name, source) for name, source in self.cluster.where().items() if of(source))
        return [
            Migration(name, source, targets[index % len(targets)], with_cache=index % 2 == 0)
            for index, (name, source) in enumerate(where)
            if targets
        ]

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        async def quietly() -> None:
            with suppress(SlotLost, Late, Refused, ValueError):
                await work

        self.doing.append(asyncio.create_task(quietly()))


async def as_drawn(cluster: Cluster, moves: list[Move]) -> None:
    """Carry the moves out: each request ends once, with what was sampled for it."""
    told: list[str] = []
    cluster.generators.on_finished.add(lambda generation: told.append(generation.id))
    plot = Story(cluster)
    for what, first, second, seconds in moves:
        plot.move(what, first, second)
        if seconds:
            await asyncio.sleep(seconds)
    for name, ending in await plot.end():
        if isinstance(ending, Generation):
            assert is_whole(ending, name)
            assert list(ending.versions) == sorted(ending.versions)
            assert len(ending.logprobs) == len(ending.versions) == 20
        else:
            assert isinstance(ending, SlotLost | Late | Refused), "the reason is one that the caller knows"
            spoilt = any(what in ("error", "drop") for what, *_ in moves)
            kills = sum(what == "kill" for what, *_ in moves)
            assert spoilt or kills >= 2, "one slot that is lost ends no request"
    live = {slot.version for slot in cluster.slots.slots.values() if slot.number in cluster.generators.slots}
    assert len(live) <= 1, "all generators sample from the same version"


@settings(max_examples=examples(200), deadline=None)
@given(moves)
def test_whatever_happens_each_request_ends_once_with_what_was_sampled_for_it(moves: list[Move]):
    with_cluster(lambda cluster: as_drawn(cluster, moves))
