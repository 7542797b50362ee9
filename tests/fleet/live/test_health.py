"""Real servers, found by the leases that they write, watched, stopped, killed and started again on the same port."""

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ductile.config.schema.fleet import FileRegistry, FleetConfig
from ductile.core.instances.topology import TopologyMember
from ductile.fleet import ElasticFleet
from ductile.fleet.registry.registries import registry_of
from ductile.fleet.servers.server_pool import Warmed
from ductile.messages.control_token import token_of
from tests.fleet.server_processes import ServerProcesses
from tests.fleet.stub_servers import StubPool
from tests.tiny import make_model_folder

pytestmark = pytest.mark.fleet

KEYS = {
    "health_check_interval_seconds": 0.5,
    "health_check_failure_threshold": 2,
    "probe_timeout_seconds": 0.4,
    "topology_change_cooldown_seconds": 0.0,
}
FOUND_S = 2.0
"""Longest time until a server that is killed or stopped is out, with these keys."""


class TakenAsTheyAre(StubPool):
    """Servers need no other weights than those of their folder."""

    async def warm(self, server: TopologyMember, donors: Sequence[TopologyMember]) -> Warmed | None:
        return Warmed(0, "")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    folder = tmp_path_factory.mktemp("fleet")
    with ServerProcesses(make_model_folder(folder / "qwen3"), folder) as started:
        started.start(number=3)
        yield started


@asynccontextmanager
async def watched(servers: ServerProcesses) -> AsyncGenerator[ElasticFleet]:
    """A fleet of all servers that live."""
    registry = FileRegistry(folder=str(servers.registry), ttl_seconds=3)
    config = FleetConfig.model_validate({**KEYS, "registry": registry})
    async with ElasticFleet(config, TakenAsTheyAre([], 0), registry=registry_of(registry)) as fleet:
        living = {each.url for each in servers.all if each.process.poll() is None}
        await comes_to(fleet, living, 30.0)
        yield fleet


async def comes_to(fleet: ElasticFleet, urls: set[str], limit_s: float) -> float:
    """Return the seconds until exactly these servers serve."""
    return await until(fleet, lambda: {*fleet.get_active_server_addresses()} == urls, limit_s)


async def until(fleet: ElasticFleet, happened: Callable[[], bool], limit_s: float = 10.0) -> float:
    """Return the seconds that it took."""
    began_s = time.monotonic()
    while not happened():
        assert time.monotonic() - began_s < limit_s, fleet.state.servers
        await asyncio.sleep(0.01)
    return time.monotonic() - began_s


def leases_in(folder: Path) -> int:
    return len(list(folder.glob("127*.json")))


def test_servers_are_found_by_the_leases_that_they_write(servers: ServerProcesses) -> None:
    async def story() -> None:
        (servers.registry / "rubbish.json").write_text('{"url": "http://127')
        async with watched(servers) as fleet:
            registry = registry_of(FileRegistry(folder=str(servers.registry), ttl_seconds=3))
            leases = await registry.servers()
            assert {*leases} == {each.url for each in servers.all}
            assert {each.pid for each in leases.values()} == {each.process.pid for each in servers.all}
            assert {each.incarnation for each in leases.values()} == {each.incarnation for each in fleet.state.serving}
            assert all(token_of(each.url, each.token_file) for each in leases.values())

    asyncio.run(story())


def test_one_that_stops_for_a_moment_stays(servers: ServerProcesses) -> None:
    async def story() -> None:
        async with watched(servers) as fleet:
            before, server = fleet.state.membership, servers.all[0]
            for _ in range(3):
                server.signal(signal.SIGSTOP)
                await asyncio.sleep(0.45)
                server.signal(signal.SIGCONT)
                await asyncio.sleep(1.5)
            assert fleet.state.membership == before

    asyncio.run(story())


def test_one_that_is_stopped_is_out_in_time_and_comes_back_as_another_member(servers: ServerProcesses) -> None:
    async def story() -> None:
        async with watched(servers) as fleet:
            all_urls, server = {each.url for each in servers.all}, servers.all[0]
            was = fleet.state.at(server.url)
            assert was is not None
            server.signal(signal.SIGSTOP)
            assert await comes_to(fleet, all_urls - {server.url}, FOUND_S) < FOUND_S
            assert "did not answer 2 probes in a row" in fleet.state.servers[was.instance].reason
            server.signal(signal.SIGCONT)
            await comes_to(fleet, all_urls, 10.0)
            now = fleet.state.at(server.url)
            assert now is not None
            assert (now.incarnation, now.instance) == (was.incarnation, f"{was.instance}+1")

    asyncio.run(story())


def test_when_all_are_stopped_none_is_out(servers: ServerProcesses) -> None:
    async def story() -> None:
        async with watched(servers) as fleet:
            before = fleet.state.membership
            for each in servers.all:
                each.signal(signal.SIGSTOP)
            await until(fleet, lambda: all(each.probe_failures > 3 for each in fleet.state.living))
            assert fleet.state.membership == before
            for each in servers.all:
                each.signal(signal.SIGCONT)
            await until(fleet, lambda: all(each.status == "ready" for each in fleet.state.living))
            assert fleet.state.membership == before

    asyncio.run(story())


def test_one_that_is_killed_is_out_at_once_and_its_port_s_next_process_is_new(servers: ServerProcesses) -> None:
    async def story() -> None:
        async with watched(servers) as fleet:
            all_urls, server = {each.url for each in servers.all}, servers.all.pop()
            was = fleet.state.at(server.url)
            assert was is not None
            server.kill()
            assert await comes_to(fleet, all_urls - {server.url}, FOUND_S) < FOUND_S
            assert fleet.state.servers[was.instance].reason == f"nobody listens at {server.url}"
            port = server.url.rpartition(":")[2]
            await asyncio.to_thread(servers.start, "--server.port", port)
            await comes_to(fleet, all_urls, 10.0)
            now = fleet.state.at(server.url)
            assert now is not None
            assert now.instance == f"{was.instance}+1"
            assert now.incarnation != was.incarnation

    asyncio.run(story())


def test_one_that_is_told_to_end_leaves_its_lease_to_nobody(servers: ServerProcesses) -> None:
    async def story() -> None:
        async with watched(servers) as fleet:
            all_urls, server = {each.url for each in servers.all}, servers.all.pop()
            lost = leases_in(servers.registry)
            server.signal(signal.SIGTERM)
            await asyncio.to_thread(server.process.wait, 30)
            await comes_to(fleet, all_urls - {server.url}, 5.0)
            assert leases_in(servers.registry) == lost - 1

    asyncio.run(story())
