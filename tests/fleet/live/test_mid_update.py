"""One of two real servers dies or stops in the middle of a version: the other one has it in less than two seconds."""

import asyncio
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor

from ductile.columns import TokenIds
from ductile.config.schema.fleet import FleetConfig
from ductile.core.instances.topology import TopologyMember
from ductile.fleet import ElasticFleet
from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.servers.pooled_servers import PooledServers
from ductile.fleet.servers.server_http import ServerDeadlines
from ductile.fleet.servers.server_port import ServerPort
from ductile.fleet.servers.shared_state import SharedFleetState
from ductile.fleet.updates.update_parties import ServerHandle, UpdateOptions, UpdateResult
from ductile.fleet.updates.weight_update import WeightUpdates
from ductile.messages.control_token import token_of
from ductile.messages.updates import Bucket, Offer, SendReport, WeightCarrier, WeightUpdate
from ductile.model.checkpoint import load_model
from ductile.records import GenerateRequest, Manifest, Sampling
from ductile.transport.deadlines import Deadlines
from ductile.weights.buckets import OwnedTensor, offer_of
from ductile.weights.carriers.shared_memory import RingMemory
from ductile.weights.digest import box_digest
from ductile.weights.sender import WeightSender
from tests.fleet.live.servers import LiveServer, Servers
from tests.generator.weight_giver import perturbed

pytestmark = pytest.mark.fleet

CONSISTENT_S = 2.0
"""Longest time from a death until all that live have the version, with these keys."""
KEYS = {
    "health_check_interval_seconds": 0.25,
    "health_check_failure_threshold": 2,
    "probe_timeout_seconds": 0.4,
    "topology_change_cooldown_seconds": 0.0,
    "flap_limit": 100,
    "max_rejoins": 100,
}


class Rank:
    """A trainer with one rank, in this process: each version is other weights. Follows `update_parties.Senders`."""

    carrier: WeightCarrier | None = None

    def __init__(self, folder: Path) -> None:
        self._weights = {name: each.data for name, each in load_model(folder).named_parameters()}
        self._sender: WeightSender | None = None
        self._memory = RingMemory()
        self._report: asyncio.Future[SendReport] | None = None

    @contextmanager
    def keeping(self, version: int) -> Generator[None]:
        yield

    async def begin_update(self, update: WeightUpdate) -> Sequence[Offer]:
        tensors = perturbed(self._weights, update.version)
        owned = [
            OwnedTensor(name, each.dtype, tuple(each.shape), [((0,) * each.dim(), tuple(each.shape))])
            for name, each in tensors.items()
        ]
        loop, report = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def fill(bucket: Bucket, buffer: Tensor) -> int:
            total = 0
            for box in bucket.boxes:
                view = tensors[box.name][tuple(map(slice, box.start, box.stop))]
                into = buffer[box.offset_bytes : box.offset_bytes + box.num_bytes].view(view.dtype).view(view.shape)
                total += box_digest(box.name, into.copy_(view), box.start)
            return total

        def tell(found: SendReport) -> None:
            loop.call_soon_threadsafe(report.set_result, found)

        self._report = report
        self._sender = WeightSender(update, offer_of("slot-0", owned, update.bucket_bytes), fill, tell, self._memory)
        return [self._sender.start()]

    async def sent(self, update_id: str) -> Sequence[SendReport]:
        assert self._report is not None
        return [await asyncio.shield(self._report)]

    async def leave_out(self, update_id: str, instance: str, reason: str) -> None:
        assert self._sender is not None
        self._sender.leave_out(instance, reason)

    async def finish_update(self, update_id: str, aborted: bool) -> None:
        assert self._sender is not None
        if aborted:
            self._sender.abort()
        await asyncio.to_thread(self._sender.finish, 10.0)
        self._memory.close()


class Fleet:
    """What a run has between these servers and its trainer, which is a `Rank`."""

    def __init__(self, model: Path, carrier: WeightCarrier) -> None:
        self.pool = RemoteGenerators(None, (), 8, 0, Deadlines(10, 20, 5, 60))
        self.fleet: ElasticFleet
        self.state = SharedFleetState()
        rank = Rank(model)
        options = UpdateOptions(bucket_bytes=8192, bucket_timeout_s=10.0, probe_timeout_s=0.4)
        updates = WeightUpdates(rank, options, lambda state, only: carrier, self.state.next_epoch)
        self.members = PooledServers(self.pool, updates, rank, _handle)
        self.results: list[UpdateResult] = []
        self.members.on_updated.add(self.results.append)
        self.version = 0

    async def publish(self) -> None:
        self.version += 1
        await self.fleet.update(self.version)
        await self.pool.receive(Manifest(self.version, "none", "", 0, 0, ()))

    async def until_serving(self, servers: Iterable[LiveServer]) -> None:
        urls = {each.url for each in servers}
        await until(lambda: {each.address for each in self.fleet.state.serving} == urls, 60)


def _handle(server: TopologyMember) -> ServerHandle[ServerPort]:
    deadlines = ServerDeadlines(state_s=0.4, control_s=10.0, verify_s=60.0)
    token = token_of(server.address)
    port = ServerPort(server.address, None, token, deadlines, id=server.instance)
    return ServerHandle(server.instance, port, server.address, token or "", server.incarnation)


async def until(happened: Callable[[], bool], within_s: float) -> None:
    ends_s = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < ends_s
        await asyncio.sleep(0.01)


@pytest.fixture
def pair(servers: Servers) -> Iterator[list[LiveServer]]:
    started = servers.start("a", "b")
    yield started
    for each in started:
        servers.remove(each)


async def in_the_middle(it: Fleet, other: LiveServer, victim: LiveServer, fault: str, point: str) -> None:
    await it.until_serving([other, victim])
    victim.fault(point, "hold")
    publishing = asyncio.create_task(it.publish())
    await until(lambda: victim.reached(point), 20)
    assert not publishing.done()
    victim.kill() if fault == "kill" else victim.stop()
    began_s = time.monotonic()
    await publishing
    took_s = time.monotonic() - began_s
    (generator,) = it.pool.instances
    found = await it.pool.digest_weights(generator)
    print(f"{fault} at {point}: {took_s:.2f} s, {it.results[-1].attempts} attempts")
    outcomes = {each.instance: each.outcome for each in it.results[-1].outcomes}
    assert sorted(outcomes.values()) == ["committed", "dead"]
    assert outcomes[generator.id] == "committed"
    assert (found.version, found.digest) == (it.version, it.results[-1].digest) == (it.version, other.live[1])
    generated = await it.pool.generate(GenerateRequest("r", TokenIds((1, 2, 3)), Sampling(max_tokens=5)))
    assert {*generated.versions} == {it.version}
    assert took_s < CONSISTENT_S
    victim.clear()
    if fault == "kill":
        await asyncio.to_thread(victim.start)
    else:
        victim.cont()


@pytest.mark.parametrize("carrier", ["shared_memory", "point_to_point", "http"])
def test_the_other_one_has_the_version_soon(pair: list[LiveServer], carrier: WeightCarrier, model: Path) -> None:
    """At the first bucket, in the middle and at the last; and who comes back gets it as it joins."""

    async def story() -> None:
        other, victim = pair
        it = Fleet(model, carrier)
        config = FleetConfig.model_validate(KEYS)
        async with ElasticFleet(config, it.members, [each.url for each in pair], state=it.state) as it.fleet:
            await it.publish()
            for fault in ("stop", "kill"):
                for point in ("bucket-first", "bucket-mid", "bucket-last"):
                    await in_the_middle(it, other, victim, fault, point)
            await it.until_serving(pair)
            assert victim.live == other.live
            await it.members.close()

    asyncio.run(asyncio.wait_for(story(), 110))
