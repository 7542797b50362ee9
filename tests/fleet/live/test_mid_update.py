"""One of two real servers dies or stops in the middle of a version: the other one has it in less than two seconds."""

import asyncio
import signal
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from torch import Tensor

from ductile.columns import TokenIds
from ductile.config.schema.fleet import FileRegistry, FleetConfig
from ductile.core.instances.topology import TopologyMember
from ductile.fleet import ElasticFleet
from ductile.fleet.registry.registries import registry_of
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
from ductile.weights.digest import box_digest
from ductile.weights.sender import WeightSender
from tests.fleet.server_processes import ServerProcess, ServerProcesses
from tests.generator.weight_giver import perturbed
from tests.tiny import make_model_folder

pytestmark = pytest.mark.fleet

CONSISTENT_S = 2.0
"""Longest time from a death until all that live have the version, with these keys."""
KEYS = {
    "health_check_interval_seconds": 0.5,
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
        self._report: asyncio.Future[SendReport] | None = None
        self.digests: dict[int, str] = {}
        self.num_buckets = 0
        """Buckets of the version that was sent last."""

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
        self._sender = WeightSender(update, offer_of("slot-0", owned, update.bucket_bytes), fill, tell)
        offer = self._sender.start()
        self.num_buckets = len(offer.buckets)
        return [offer]

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


class Fleet:
    def __init__(self, servers: ServerProcesses, faults: Path, carrier: WeightCarrier) -> None:
        self.servers, self.faults = servers, faults
        self.registry = registry_of(FileRegistry(folder=str(servers.registry), ttl_seconds=3))
        self.pool = RemoteGenerators(None, (), 8, 0, Deadlines(10, 20, 5, 60))
        self.rank = Rank(servers.model)
        self.fleet: ElasticFleet
        self.state = SharedFleetState()
        options = UpdateOptions(bucket_bytes=30_000, bucket_timeout_s=10.0, probe_timeout_s=0.4)
        updates = WeightUpdates(self.rank, options, lambda state, only: carrier, self.state.next_epoch)
        self.members = PooledServers(self.pool, updates, self.rank, self._member)
        self.results: list[UpdateResult] = []
        self.members.on_updated.add(self.results.append)
        self.version = 0

    def _member(self, server: TopologyMember) -> ServerHandle[ServerPort]:
        lease = self.leases[server.address]
        deadlines = ServerDeadlines(state_s=0.4, control_s=10.0, verify_s=60.0)
        token = token_of(lease.url, lease.token_file)
        port = ServerPort(server.address, None, token, deadlines, id=server.instance)
        return ServerHandle(server.instance, port, server.address, token or "", server.incarnation)

    async def look(self) -> None:
        self.leases = await self.registry.servers()

    async def publish(self) -> None:
        self.version += 1
        await self.fleet.update(self.version)
        await self.pool.receive(Manifest(self.version, "disk", "", 0, 0, ()))

    async def until_serving(self, urls: set[str]) -> None:
        async with asyncio.timeout(60):
            while {each.address for each in self.fleet.state.serving} != urls:
                await self.look()
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    folder = tmp_path_factory.mktemp("fleet")
    with ServerProcesses(make_model_folder(folder / "qwen3"), folder) as started:
        started.start(number=1)
        yield started


async def in_the_middle(it: Fleet, victim: ServerProcess, number: int, point: str) -> None:
    urls = {each.url for each in it.servers.all if each.process.poll() is None}
    other = next(url for url in urls if url != victim.url)
    await it.until_serving(urls)
    (it.faults / point).write_text("hold")
    publishing = asyncio.create_task(it.publish())
    async with httpx.AsyncClient() as client, asyncio.timeout(20):
        while True:
            await asyncio.sleep(0.05)
            seen = (await client.get(f"{victim.url}/fleet/state")).json()["update"]
            if seen and not publishing.done() and seen["phase"] in ("prepared", "receiving"):
                total = it.rank.num_buckets
                places = {"bucket-first": 0, "bucket-mid": total // 2, "bucket-last": total - 1}
                if seen["num_buckets"] == places[point]:
                    break
    await asyncio.sleep(0.1)
    victim.signal(number)
    began_s = time.monotonic()
    await publishing
    took_s = time.monotonic() - began_s
    (generator,) = it.pool.instances
    found = await it.pool.digest_weights(generator)
    print(f"{signal.Signals(number).name} {point}: {took_s:.2f} s, {it.results[-1].attempts} attempts")
    assert [each.outcome for each in it.results[-1].outcomes if each.instance in other] == ["committed"]
    assert [each.outcome for each in it.results[-1].outcomes if each.instance not in other] == ["dead"]
    assert (found.version, found.digest) == (it.version, it.results[-1].digest)
    generated = await it.pool.generate(GenerateRequest("r", TokenIds((1, 2, 3)), Sampling(max_tokens=5)))
    assert {*generated.versions} == {it.version}
    assert took_s < CONSISTENT_S
    (it.faults / point).unlink()
    if number == signal.SIGSTOP:
        victim.signal(signal.SIGCONT)


@pytest.mark.parametrize("carrier", ["shared_memory", "point_to_point"])
def test_the_other_one_has_the_version_soon(servers: ServerProcesses, carrier: WeightCarrier, tmp_path: Path) -> None:
    """At the first bucket, in the middle and at the last; and who comes back gets it as it joins."""

    async def story() -> None:
        it = Fleet(servers, tmp_path, carrier)
        await it.look()
        config = FleetConfig.model_validate(KEYS)
        async with ElasticFleet(config, it.members, registry=it.registry, state=it.state) as it.fleet:
            (victim,) = await asyncio.to_thread(servers.start, DUCTILE_FAULTS=str(tmp_path))
            await it.look()
            await it.fleet.look()
            await it.publish()
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for point in ("bucket-first", "bucket-mid", "bucket-last"):
                    await in_the_middle(it, victim, number, point)
                    if number == signal.SIGKILL:
                        await asyncio.to_thread(victim.process.wait, 10)
                        (victim,) = await asyncio.to_thread(servers.start, DUCTILE_FAULTS=str(tmp_path))
            victim.kill()
            await it.members.close()

    asyncio.run(asyncio.wait_for(story(), 110))
