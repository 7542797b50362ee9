"""Servers that come, and come back, while versions are on their way: the fleet, its updates and its pool as one. In
memory and in virtual time."""

import asyncio
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from uuid import uuid4

import pytest

from ductile.config.schema.fleet import FleetConfig
from ductile.core.instances.instances import Instance
from ductile.core.rollouts.provenance import KnownWeights
from ductile.fleet import ElasticFleet
from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.requests.instance_port import check_has
from ductile.fleet.servers.monitor import ProbeOutcome
from ductile.fleet.servers.pooled_servers import PooledServers
from ductile.fleet.servers.shared_state import SharedFleetState
from ductile.fleet.updates.update_parties import ServerHandle, UpdateOptions
from ductile.fleet.updates.weight_update import WeightUpdates
from ductile.messages.updates import EndUpdate, Offer, ServerState, UpdateProgress, VersionLease
from ductile.records import Manifest
from ductile.roles import Late, Refused, SlotLost
from ductile.transport.deadlines import Deadlines
from tests.fleet.test_weight_update import Ranks, Server
from tests.orchestrator.doubles import clock, run

A, B, C = "http://a:1", "http://b:1", "http://c:1"
OPTIONS = UpdateOptions(probe_timeout_s=0.5, bucket_timeout_s=1.0, total_timeout_s=5.0)


class Port:
    """A server's port, as far as versions need it. opens: called before it opens."""

    is_needed, max_num_seqs, why_lost, heard_at = False, 4, "", float("-inf")

    def __init__(self, member, run):
        self.instance, self.address = Instance(member.instance, "generate", ()), member.address
        self.incarnation, self.version, self.run = member.incarnation, None, run
        self.condemned = self.released = False

    def __getattr__(self, name):
        """Ask the process that is at the address."""
        return getattr(self._process, name)

    @property
    def _process(self):
        process = self.run.processes.get(self.address)
        if process is None or process.incarnation != self.incarnation:
            raise SlotLost(f"{self.address} is another process")
        return process

    async def open(self):
        if opens := self.run.opens.get(self.address):
            await opens()
        state = await self._process.state()
        self.version = state.version
        return state

    async def commit(self, end):
        reply = await self._process.commit(end)
        self.version = end.version
        return reply

    async def lease(self, asked):
        if (await self._process.state()).version != asked.version:
            raise Refused(f"it does not have version {asked.version}")
        return VersionLease(asked.version, self._process.digest, Offer("donor", (), ()))

    async def end_lease(self, end):
        await self._process.state()

    async def receive(self, manifest):
        check_has(self, manifest.version)

    def listen(self, deliver):
        pass

    def describe(self):
        return self.instance.id

    def condemn(self, why):
        self.condemned = True

    async def release(self):
        self.released = True


class Trainer(Ranks):
    gone_on = False

    @contextmanager
    def keeping(self, version):
        if self.gone_on:
            raise Refused(f"the trainer has gone on from version {version}, and cannot offer it")
        with super().keeping(version):
            yield


class Run:
    """Processes by address, and the run that gives them versions."""

    def __init__(self, addresses, patience_s=20.0, **keys):
        keys = {"topology_change_cooldown_seconds": 0.0, "health_check_interval_seconds": 0.5} | keys
        self.processes = {address: process() for address in addresses}
        self.opens, self.ports, self.told, self.results = {}, [], [], []
        self.state = state = SharedFleetState(clock)
        self.ranks = Trainer(self, takes_s=0.05)
        self.pool = RemoteGenerators(None, (), 4, 16, Deadlines.same(5.0))
        self.updates = WeightUpdates(self.ranks, OPTIONS, lambda state, only: "http", state.next_epoch, clock)
        self.servers = PooledServers(self.pool, self.updates, self.ranks, self._open)
        self.servers.on_updated.add(self.results.append)
        self.fleet = ElasticFleet(
            FleetConfig.model_validate(keys),
            self.servers,
            addresses,
            probe=self._probe,
            patience_s=patience_s,
            tell=self.told.append,
            state=state,
        )
        self.pool.deliver_by(self)
        self.missing = ""

    def __getitem__(self, id):
        return self.processes[self.state.now.servers[id].address]

    def _open(self, member):
        self.ports.append(port := Port(member, self))
        return ServerHandle(member.instance, port, member.address, "", member.incarnation)

    async def _probe(self, address):
        found = self.processes.get(address)
        if found is None or not found.alive:
            return ProbeOutcome("closed", f"nobody listens at {address}")
        return ProbeOutcome("answered", state=ServerState(found.incarnation, "m", found.version, found.digest, 0))

    async def deliver(self, version):
        await self.fleet.update(version)
        return self.updates.known or KnownWeights(version)

    async def publish(self, version):
        await self.pool.receive(Manifest(version, "none", "", 0, 0, ()))

    def start(self, address):
        """A process starts at the address."""
        self.processes[address] = process()
        self.fleet.register_server(address)

    def at(self, address):
        return self.state.now.at(address)

    async def until(self, condition, limit_s=5.0):
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0)
                await asyncio.sleep(0.001)

    def is_ready(self, address, version):
        found = self.at(address)
        return (
            found is not None
            and (found.status, found.version) == ("ready", version)
            and self.processes[address].version == version
            and found.instance in {each.id for each in self.pool.instances}
        )


def process():
    return Server("a server", incarnation=uuid4().hex, version=0)


@asynccontextmanager
async def run_of(*addresses, **keys):
    one = Run(addresses, **keys)
    async with one.fleet:
        await one.publish(1)
        yield one


@pytest.mark.parametrize(("num", "cooldown_s"), [(1, 0.0), (2, 0.0), (2, 1000.0)])
def test_a_server_that_is_started_again_while_a_version_is_delivered_gets_it(num: int, cooldown_s: float) -> None:
    """Without it there are too few, so the run waits for it, and not for the cooldown."""

    async def story() -> None:
        keys = {"min_healthy_servers": num, "topology_change_cooldown_seconds": cooldown_s}
        async with run_of(*[A, B][:num], **keys) as one:
            one.processes[A].faults = {"verify": "exit"}
            publishing = asyncio.create_task(one.publish(2))
            await asyncio.sleep(2.0)
            assert one.pool.version == 1
            one.start(A)
            async with asyncio.timeout(2.0):
                await publishing
            await one.until(lambda: one.is_ready(A, 2))

    run(story())


def test_a_server_that_waits_for_the_cooldown_is_no_receiver_where_there_are_enough() -> None:
    async def story() -> None:
        async with run_of(A, topology_change_cooldown_seconds=30.0) as one:
            one.start(B)
            await one.until(lambda: one.at(B) is not None)
            await one.publish(2)
            assert one.at(B).status == "joining"

    run(story())


@pytest.mark.parametrize("point", ["prepare", "verify"])
def test_a_version_goes_to_one_that_refuses_it_once_a_second(point: str) -> None:
    async def story() -> None:
        async with run_of(A, patience_s=5.0) as one:
            one.processes[A].faults = {point: "refuse"}
            with pytest.raises(Late, match="have taken version 2 in 5 s"):
                await one.publish(2)
            sent = [each for each in one.results if each.version == 2]
            assert 5 <= len(sent) <= 6

    run(story())


def test_one_that_comes_is_sent_the_version_at_once_and_not_after_the_pause() -> None:
    async def story() -> None:
        async with run_of(A) as one:
            one.processes[A].faults = {"prepare": "refuse"}
            publishing = asyncio.create_task(one.publish(2))
            await one.until(lambda: len(one.results) == 2)
            began_s = clock()
            one.start(B)
            await publishing
            assert clock() - began_s < 0.5

    run(story())


@pytest.mark.parametrize("turns", range(8))
def test_a_join_that_ends_as_the_receivers_are_decided_gets_the_version_too(turns: int) -> None:
    async def story() -> None:
        async with run_of(A) as one:
            publishing = []
            note = one.updates._note

            async def publish() -> None:
                for _ in range(turns):
                    await asyncio.sleep(0)
                await one.publish(2)

            def noted(result: object) -> None:
                note(result)
                if not publishing:
                    publishing.append(asyncio.create_task(publish()))

            one.updates._note = noted
            one.start(B)
            await one.until(lambda: bool(publishing))
            await publishing[0]
            await one.until(lambda: one.is_ready(B, 2), 1.0)

    run(story())


def test_a_join_does_not_end_while_another_receiver_is_slow_to_open() -> None:
    async def story() -> None:
        async with run_of(A, flap_limit=1) as one:
            num_opened = 0

            async def opens() -> None:
                nonlocal num_opened
                num_opened += 1
                if num_opened == 1:
                    raise Late("c did not respond")
                await asyncio.sleep(0.5)

            one.opens[C] = opens
            one.start(C)
            await one.until(lambda: (c := one.at(C)) is not None and c.status == "stale")
            one.start(B)
            await one.until(lambda: one.updates.under_way.endswith("joins"))
            await one.publish(2)
            await one.until(lambda: one.is_ready(B, 2), 0.5)
            assert [each.version for each in one.results] == [1, 2]
            assert one.processes[B].said.count("commit") == 1, "it was given the version before as well"

    run(story())


def test_the_death_of_the_one_that_gives_weights_is_not_held_against_the_one_that_joins() -> None:
    async def story() -> None:
        async with run_of(A, flap_limit=1, flap_backoff_seconds=600) as one:
            one.ranks.gone_on = True  # A alone has the version
            verify = Server.verify

            async def cut_off(end: EndUpdate) -> UpdateProgress:
                one.processes[A].alive = False
                one.processes[B].verify = partial(verify, one.processes[B])
                return UpdateProgress(end.update_id, "failed", reason="a cannot be reached")

            one.start(B)
            one.processes[B].verify = cut_off
            await one.until(lambda: one.at(A) is None or one.at(A).status == "dead")
            assert one.at(B).status == "warming"
            assert not [said for said in one.told if "could not be given weights" in said]
            one.ranks.gone_on = False
            await one.until(lambda: one.is_ready(B, 1), 1.0)

    run(story())


def test_one_that_serves_a_version_before_the_live_one_is_caught_up_with() -> None:
    """However it came to that: here, the version was not sent to it."""

    async def story() -> None:
        async with run_of(A, B, health_check_interval_seconds=0.1) as one:
            update_began = one.fleet._judge.update_began

            def without_b(version, receivers):
                return update_began(version, [each for each in receivers if each == one.at(A).instance])

            one.fleet._judge.update_began = without_b
            await one.publish(2)
            assert (one.at(B).status, one.at(B).version) == ("ready", 1)
            await one.until(lambda: one.is_ready(B, 2), 1.0)

    run(story())


def test_a_join_and_a_version_that_open_a_server_at_the_same_time_leave_it_with_one_port() -> None:
    async def story() -> None:
        async with run_of(A) as one:
            one.opens[B] = lambda: asyncio.sleep(0.3)
            one.start(B)
            await one.until(lambda: (b := one.at(B)) is not None and b.status == "warming")
            await one.publish(2)
            await one.until(lambda: one.is_ready(B, 2))
            mine = [port for port in one.ports if port.address == B]
            assert [port.released for port in mine].count(False) == 1
            await one.publish(3)
            assert one.is_ready(B, 3)

    run(story())


def test_a_joiner_that_is_overtaken_by_a_version_gets_that_one_with_the_others() -> None:
    async def story() -> None:
        async with run_of(A) as one:
            one.ranks.takes_s = 0.5
            one.start(B)
            await one.until(lambda: (b := one.at(B)) is not None and b.status == "warming")
            await one.publish(2)
            assert (one.at(B).status, one.at(B).version) == ("ready", 2)
            await one.until(lambda: one.is_ready(B, 2), 0.5)

    run(story())


def test_nobody_is_kept_out_as_the_trainer_has_gone_on_and_no_server_has_the_version() -> None:
    async def story() -> None:
        async with run_of(A) as one:
            del one.processes[A]
            await one.until(lambda: one.at(A) is None)
            one.ranks.gone_on = True
            one.start(B)
            await asyncio.sleep(10.0)
            assert one.at(B).status == "warming"
            assert not one.fleet.kept_out
            assert not [each for each in one.told if "could not be given weights" in each]
            one.ranks.gone_on = False
            await one.publish(2)
            await one.until(lambda: one.is_ready(B, 2), 0.5)

    run(story())


def test_a_join_that_fails_with_what_nobody_expected_has_ended() -> None:
    async def story() -> None:
        async with run_of(A) as one:

            async def opens() -> None:
                one.opens.clear()
                raise ValueError("its address has more than host and port")

            one.opens[B] = opens
            one.start(B)
            await one.until(lambda: one.is_ready(B, 1))
            assert any("given weights: ValueError: its address has" in each for each in one.told)

    run(story())


def test_a_server_that_drains_is_not_cut_off_by_a_version() -> None:
    async def story() -> None:
        async with run_of(A, B) as one:
            await one.until(lambda: one.is_ready(B, 1))
            finished = asyncio.Event()
            one.pool.dismiss = lambda instance, timeout_s: drained(instance)

            async def drained(instance: Instance) -> None:
                one.pool.drain(instance)
                await finished.wait()

            one.fleet.deregister_server(B)
            await one.until(lambda: one.at(B).status == "draining")
            await one.publish(2)
            port = next(port for port in one.ports if port.address == B)
            assert (one.pool.version, port.condemned, one.at(B).status) == (2, False, "draining")
            finished.set()
            await one.until(lambda: one.at(B) is None)

    run(story())
