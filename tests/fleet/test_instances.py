"""Generators on two slots and on none: who is told what, where requests go, and what becomes of them."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from ductile.core.instances.instances import Instance, InstanceId, instance_on
from ductile.core.rollouts.provenance import KnownWeights
from ductile.core.scheduling.orders import Migration
from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.requests.instance_port import InstanceEvent, Returned, RoleSlots, check_has
from ductile.messages.workers import (
    AssignRole,
    Command,
    Done,
    Failed,
    Generate,
    MigrateOut,
    OfferWeights,
    Receive,
    ReleaseRole,
    Reply,
)
from ductile.records import Manifest
from ductile.roles import Failure, Late, NotTaken, Refused, SlotLost
from ductile.transport.mailbox import Died
from tests.fleet.generate_slots import generator
from tests.fleet.test_migration import (
    DEADLINES,
    TIMEOUT_S,
    Cluster,
    Move,
    as_drawn,
    is_whole,
    moves,
    steps,
    with_cluster,
)
from tests.nightly import examples
from tests.orchestrator.doubles import clock

PAIR = instance_on("generate", (0, 1))
ELSEWHERE = Instance(InstanceId("http://elsewhere"), "generate", ())
SENT = "what the servers were sent"
BEHIND = 10
"""Slot of the double that does the server's work."""


class Elsewhere:
    """A server on no slot of the run: an `InstancePort`, with an engine of the double behind it."""

    max_num_seqs, is_needed = 16, False
    instance = ELSEWHERE

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.why_lost = cluster, ""
        self.deliver: Callable[[InstanceEvent], None] = lambda event: None
        self.asked: list[Command] = []
        self.raises: Exception | None = None
        self.dies_at: type[Command] | None = None
        """Command that it takes, and dies."""
        cluster.slots.slots[BEHIND].holds, cluster.slots.slots[BEHIND].version = True, 0
        cluster.mailbox.subscribe(lambda slot, event: self.say(event) if slot == BEHIND else None)

    @property
    def version(self) -> int | None:
        return self.cluster.slots.slots[BEHIND].version

    def describe(self) -> str:
        return ELSEWHERE.id

    def say(self, event: InstanceEvent) -> None:
        if isinstance(event, Died):
            self.why_lost = event.reason
        self.deliver(event)

    async def ask(self, command: Command) -> Reply:
        self.asked.append(command)
        if self.raises:
            raise self.raises
        if self.dies_at is not None and isinstance(command, self.dies_at):
            self.say(Died("http://elsewhere is gone"))
            return Done()
        if BEHIND in self.cluster.mailbox.lost:
            raise SlotLost("http://elsewhere cannot be reached")
        reply = await self.cluster.slots.respond(BEHIND, command)
        if isinstance(reply, Failed):
            raise Refused(reply.error)
        return reply

    async def receive(self, manifest: Manifest) -> None:
        check_has(self, manifest.version)

    async def release(self) -> None:
        self.cluster.slots.slots[BEHIND].live.clear()

    def condemn(self, why: str) -> None:
        """Returns its requests with the tokens that they have."""
        live, self.cluster.slots.slots[BEHIND].live = self.cluster.slots.slots[BEHIND].live, {}
        for request in live.values():
            self.say(Returned(request, NotTaken(why)))

    def listen(self, deliver: Callable[[InstanceEvent], None]) -> None:
        self.deliver = deliver


class Mixed(Cluster):
    """A generator on slots 0 and 1, one on slot 2, and one on none. Follows `worker_pool.Delivery`."""

    def __init__(self) -> None:
        super().__init__(generating=(0, 1, 2))
        self.server = Elsewhere(self)
        slots = RoleSlots(self.mailbox, "generate", TIMEOUT_S)
        self.generators = RemoteGenerators(slots, (PAIR, generator(2)), 4, 16, DEADLINES, self.offers)
        self.generators.on_restarted.add(lambda sentence, lost: self.restarted.append(lost))
        self.generators.deliver_by(self)
        self.gives = True
        """Whether its owner gives the server the weights of each version."""

    async def deliver(self, version: int) -> KnownWeights:
        if self.gives:
            self.slots.slots[BEHIND].version = version
        return KnownWeights(version, SENT)


def with_mixed(story: Callable[[Mixed], Coroutine[Any, Any, None]]) -> None:
    async def with_server(cluster: Mixed) -> None:
        assert await cluster.generators.add_server(cluster.server)
        await story(cluster)

    with_cluster(with_server, Mixed)


@settings(max_examples=examples(100), deadline=None)
@given(moves)
def test_whatever_happens_each_request_ends_once_with_what_was_sampled_for_it(moves: list[Move]):
    with_mixed(lambda cluster: as_drawn(cluster, moves))


def test_requests_go_to_the_first_slot_and_to_the_server_and_weights_to_every_slot():
    async def story(cluster: Mixed):
        asked = {name: cluster.ask(name) for name in "abc"}
        await steps(2)
        assert cluster.where() == {"a": "generator-0-1", "b": "generator-2", "c": "http://elsewhere"}
        assert [slot for slot, _ in cluster.sent(Generate)] == [0, 2]
        assert [type(command) for command in cluster.server.asked] == [Generate]
        assert [slot for slot, _ in cluster.sent(Receive)] == [0, 1, 2]
        assert cluster.generators.capacity == 24
        assert cluster.generators.slots == (0, 1, 2)
        for name, task in asked.items():
            assert is_whole(await task, name)

    with_mixed(story)


def test_requests_migrate_between_them_and_nobody_notices():
    async def story(cluster: Mixed):
        asked = {name: cluster.ask(name) for name in "abc"}
        await steps(5)
        orders = [
            Migration("a", PAIR.id, ELSEWHERE.id, with_cache=True),
            Migration("b", InstanceId("generator-2"), PAIR.id),
            Migration("c", ELSEWHERE.id, InstanceId("generator-2"), with_cache=True),
        ]
        results = await cluster.generators.migrate(orders)
        assert [(result.instance, result.why) for result in results] == [(order.target, "") for order in orders]
        assert [slot for slot, _ in cluster.sent(MigrateOut)] == [0, 2]
        assert cluster.where() == {order.id: order.target for order in orders}
        for name, task in asked.items():
            assert is_whole(await task, name)
        assert sorted(cluster.slots.with_cache) == ["a", "c"]

    with_mixed(story)


def test_a_server_that_dies_with_a_request_that_has_just_come_is_not_waited_for():
    async def story(cluster: Mixed):
        task = cluster.ask("a")
        await steps(5)
        cluster.server.dies_at = Generate
        began_s = clock()
        await cluster.generators.migrate([Migration("a", PAIR.id, ELSEWHERE.id)])
        assert ELSEWHERE not in cluster.generators.all_instances
        assert is_whole(await task, "a")
        assert clock() - began_s < TIMEOUT_S / 2

    with_mixed(story)


def test_what_a_server_refuses_goes_elsewhere_and_ends_the_request_when_nobody_else_is_there():
    async def story(cluster: Mixed):
        ended = list[Failure | None]()
        cluster.generators.on_ended.add(lambda server, failure, began_at: ended.append(failure))
        cluster.server.raises = ConnectionError("connection refused")
        for name, task in {name: cluster.ask(name) for name in "abc"}.items():
            assert is_whole(await task, name)
        (error,) = [each for each in ended if each is not None]
        assert isinstance(error, Refused)
        assert "http://elsewhere: ConnectionError: connection refused" in str(error)
        for instance in (PAIR, generator(2)):
            cluster.generators.put_aside(instance.id, "it is put aside")
        with pytest.raises(Refused, match="connection refused"):
            await cluster.ask("d")

    with_mixed(story)


def test_an_instance_of_two_slots_joins_and_leaves_as_a_whole():
    async def story(cluster: Mixed):
        joiner = instance_on("generate", (3, 4), birth=1)
        cluster.carrier.sent.clear()
        assert await cluster.generators.admit(joiner, {})
        assert [(slot, command.layout.slots) for slot, command in cluster.sent(AssignRole)] == [
            (3, (3, 4)),
            (4, (3, 4)),
        ]
        assert [slot for slot, _ in cluster.sent(OfferWeights)] == [0], "one slot offers the weights to all"
        assert [slot for slot, _ in cluster.sent(Receive)] == [3, 4]
        assert cluster.generators.instances == (PAIR, generator(2), joiner, ELSEWHERE)
        with pytest.raises(ValueError, match="slot 4 has the role 'generate' already"):
            await cluster.generators.admit(instance_on("generate", (4, 5), birth=2), {})
        await cluster.generators.dismiss(joiner)
        assert [slot for slot, _ in cluster.sent(ReleaseRole)] == [3, 4]
        assert cluster.generators.instances == (PAIR, generator(2), ELSEWHERE)
        again = instance_on("generate", (3, 4), birth=3)
        assert await cluster.generators.admit(again, {})
        assert again.id != joiner.id

    with_mixed(story)


def test_a_half_that_does_not_come_leaves_neither_half_behind():
    async def story(cluster: Mixed):
        cluster.carrier.fail(4, "error", on=Receive, times=9)
        with pytest.raises(Refused, match="Receive failed, as asked"):
            await cluster.generators.admit(instance_on("generate", (3, 4), birth=1), {})
        await asyncio.sleep(1)
        assert sorted(slot for slot, _ in cluster.sent(ReleaseRole)) == [3, 4]
        assert cluster.generators.instances == (PAIR, generator(2), ELSEWHERE)

    with_mixed(story)


def test_with_one_of_its_slots_an_instance_is_lost_and_its_requests_begin_again_elsewhere():
    async def story(cluster: Mixed):
        asked = {name: cluster.ask(name) for name in "abc"}
        await steps(5)
        cluster.slots.slots[0].live.clear()  # the engine on two slots has stopped with the second one
        cluster.slots.kill(1, cluster.mailbox)
        await steps(1)
        assert cluster.restarted == ["generator-0-1"]
        assert cluster.generators.instances == (generator(2), ELSEWHERE)
        assert [slot for slot, _ in cluster.sent(ReleaseRole)] == [0], "the slot that is left may do something else"
        for name, task in asked.items():
            assert is_whole(await task, name)

    with_mixed(story)


def test_the_slot_that_is_left_of_a_lost_instance_may_join_again_at_once():
    async def story(cluster: Mixed):
        cluster.slots.kill(1, cluster.mailbox)
        assert await asyncio.create_task(cluster.generators.admit(generator(0, birth=1), {}))
        told = [type(command) for slot, command in cluster.carrier.sent if slot == 0]
        assert told.index(ReleaseRole) < told.index(AssignRole), "it gives the old role up before it takes the new one"

    with_mixed(story)


def test_a_server_that_is_gone_is_none_any_more():
    async def story(cluster: Mixed):
        asked = {name: cluster.ask(name) for name in "abc"}
        await steps(5)
        cluster.slots.slots[BEHIND].live.clear()
        cluster.server.say(Died("http://elsewhere cannot be reached"))
        await steps(1)
        assert cluster.restarted == ["http://elsewhere"]
        assert cluster.generators.instances == (PAIR, generator(2))
        for name, task in asked.items():
            assert is_whole(await task, name)

    with_mixed(story)


def test_the_end_of_a_server_that_has_no_request_is_told_too():
    """It may be lost with a canary, or a request that was to migrate to it."""

    async def story(cluster: Mixed):
        told: list[tuple[InstanceId, str]] = []
        cluster.generators.on_lost.add(lambda id, why: told.append((id, why)))
        cluster.server.say(Died("http://elsewhere cannot be reached"))
        assert told == [(ELSEWHERE.id, "http://elsewhere cannot be reached")]

    with_mixed(story)


def test_a_server_that_is_not_given_a_version_is_left_behind_with_what_it_has_sampled():
    async def story(cluster: Mixed):
        asked = {name: cluster.ask(name) for name in "abc"}
        await steps(5)
        cluster.gives = False
        await cluster.publish(1)
        assert cluster.generators.version == 1
        assert cluster.generators.instances == (PAIR, generator(2)), "it takes no work"
        assert ELSEWHERE in cluster.generators.all_instances, "it may be given a later one"
        assert ELSEWHERE.id not in cluster.where().values()
        for name, task in asked.items():
            assert is_whole(await task, name)
        assert list((await asked["c"]).versions) == [0] * 5 + [1] * 15, "what it had sampled is not sampled again"
        assert not cluster.generators.readmit(ELSEWHERE.id), "a server with an old version does not come back"
        cluster.gives = True
        await cluster.publish(2)
        assert cluster.generators.instances == (PAIR, generator(2), ELSEWHERE)

    with_mixed(story)


def test_who_comes_while_servers_get_a_version_is_not_kept_waiting():
    """Servers that the version waits for can come, and what they have sampled of it meanwhile is taken."""

    async def story(cluster: Mixed):
        generators, delivering, late = cluster.generators, asyncio.Event(), Elsewhere(cluster)
        late.instance = Instance(InstanceId("http://late"), "generate", ())
        asked = {name: cluster.ask(name) for name in "abc"}
        await steps(5)

        async def deliver(version: int) -> KnownWeights:
            cluster.slots.slots[BEHIND].version = version
            delivering.set()
            await steps(5)
            assert not cluster.sent(Receive)[3:], "slots get it when the servers have it"
            assert not await generators.add_server(late), "the version that it has is not live yet"
            assert generators.readmit(ELSEWHERE.id) is False
            assert generators.version == 0
            return KnownWeights(version, SENT)

        cluster.deliver = deliver
        publishing = asyncio.create_task(cluster.publish(1))
        await delivering.wait()
        await publishing
        assert generators.version == 1
        assert {*generators.instances} == {PAIR, generator(2), ELSEWHERE, late.instance}
        assert [slot for slot, _ in cluster.sent(Receive)[3:]] == [0, 1, 2]
        assert cluster.restarted == []
        for name, task in asked.items():
            assert is_whole(await task, name)
            assert {*(await task).versions} == {0, 1}

    with_mixed(story)


def test_a_version_that_servers_cannot_be_given_is_not_live_on_slots():
    async def story(cluster: Mixed):
        async def deliver(version: int) -> KnownWeights:
            raise Late("no server has taken it")

        cluster.deliver = deliver
        with pytest.raises(Late, match="no server has taken it"):
            await cluster.publish(1)
        assert cluster.generators.version == 0
        assert {command.manifest.version for _, command in cluster.sent(Receive)} == {0}

    with_mixed(story)


@pytest.mark.parametrize("digest", ["", "what the slots were given"])
def test_what_was_given_is_what_servers_were_sent_where_the_manifest_does_not_know_it(digest: str):
    async def story(cluster: Mixed):
        manifest = replace(await cluster.trainer.publish(1), digest=digest)
        assert (await cluster.generators.receive(manifest)).digest == (digest or SENT)
        await cluster.trainer.withdraw(1)

    with_mixed(story)


def test_a_server_that_is_put_aside_while_its_version_goes_live_waits_until_it_is_readmitted():
    """Its fleet does not trust the weights that it has, whatever version they are called."""

    async def story(cluster: Mixed):
        async def deliver(version: int) -> KnownWeights:
            cluster.slots.slots[BEHIND].version = version
            cluster.generators.put_aside(ELSEWHERE.id, "the digest of its version is another")
            return KnownWeights(version, SENT)

        cluster.deliver = deliver
        await cluster.publish(1)
        assert cluster.generators.instances == (PAIR, generator(2))
        assert cluster.generators.readmit(ELSEWHERE.id)
        assert cluster.generators.instances == (PAIR, generator(2), ELSEWHERE)

    with_mixed(story)


def test_a_server_is_put_aside_taken_back_and_removed():
    async def story(cluster: Mixed):
        generators, told = cluster.generators, []
        generators.on_change.add(lambda: told.append(generators.capacity))
        tasks = [cluster.ask(name) for name in "bca"]
        await steps(3)
        generators.put_aside(ELSEWHERE.id, "its weights are not trusted")
        await steps(1)
        assert cluster.where()["a"] == PAIR.id
        assert generators.readmit(ELSEWHERE.id)
        await generators.remove_server(ELSEWHERE.id, "it is evicted")
        assert generators.all_instances == (PAIR, generator(2))
        assert told == [8, 24, 8]
        assert all(map(is_whole, await asyncio.gather(*tasks), "bca"))

    with_mixed(story)
