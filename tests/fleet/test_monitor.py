"""Probes over real sockets: what each failure is taken for, and that one server's is no other one's."""

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Awaitable, Callable

import pytest

from ductile.config.schema.fleet import FleetConfig
from ductile.fleet.servers.monitor import MOST_PROBES, HttpProbe, Monitor, ProbeOutcome
from tests.fleet.stub_servers import StubServer, stub_servers, until

QUICK = FleetConfig(health_check_interval_seconds=0.05, probe_timeout_seconds=0.04)


def probed(prepare: Callable[[StubServer], Awaitable[object]]) -> ProbeOutcome:
    async def story() -> ProbeOutcome:
        async with stub_servers(1) as (server,):
            probe = HttpProbe(0.2)
            try:
                assert (await probe(server.url)).kind == "answered"
                await prepare(server)
                return await probe(server.url)
            finally:
                await probe.close()

    return asyncio.run(story())


async def _nothing(server: StubServer) -> None: ...


async def _slow(server: StubServer) -> None:
    server.delay_s = 5.0


async def _broken(server: StubServer) -> None:
    server.status = 500


async def _locked(server: StubServer) -> None:
    server.status = 401


FOUND = {
    "answered": _nothing,
    "closed": StubServer.kill,
    "silent": _slow,
    "odd": _broken,
    "denied": _locked,
}


@pytest.mark.parametrize("kind", FOUND)
def test_each_failure_is_told_apart(kind: str) -> None:
    found = probed(FOUND[kind])
    assert found.kind == kind
    assert bool(found.reason) == (kind != "answered")


def test_a_socket_that_takes_connections_and_says_nothing_is_silent() -> None:
    """As a stopped process: the kernel takes the connection."""

    async def story() -> ProbeOutcome:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            probe = HttpProbe(0.1)
            try:
                return await probe(f"http://127.0.0.1:{listener.getsockname()[1]}")
            finally:
                await probe.close()

    assert asyncio.run(story()).kind == "silent"


def test_that_we_have_no_sockets_left_is_no_server_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*args: object, **kwargs: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def story() -> ProbeOutcome:
        async with stub_servers(1) as (server,):
            probe = HttpProbe(0.2)
            try:
                with monkeypatch.context() as patch:
                    patch.setattr(socket, "socket", no_more)
                    return await probe(server.url)
            finally:
                await probe.close()

    assert asyncio.run(story()).kind == "unasked"


def test_a_server_that_is_slow_delays_no_other() -> None:
    """And is itself asked one at a time."""

    async def story() -> None:
        async with stub_servers(8) as servers:
            servers[0].delay_s = 10.0
            found: dict[str, list[str]] = {server.url: [] for server in servers}
            config = QUICK.model_copy(update={"probe_timeout_seconds": 1.0})
            probe = HttpProbe(config.probe_timeout_seconds)
            monitor = Monitor(probe, lambda: found, lambda address, each: found[address].append(each.kind), config)
            monitor.start()
            monitor.start()
            await asyncio.sleep(0.5)
            await monitor.stop()
            await probe.close()
            assert all(len(found[server.url]) >= 4 for server in servers[1:])
            assert {kind for server in servers[1:] for kind in found[server.url]} == {"answered"}
            assert servers[0].num_asked == 1

    asyncio.run(story())


def test_a_hundred_servers_are_not_asked_all_at_the_same_instant() -> None:
    under_way = most = 0

    async def probe(address: str) -> ProbeOutcome:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return ProbeOutcome("silent", "late")

    async def story() -> None:
        told: list[str] = []
        monitor = Monitor(probe, lambda: list(map(str, range(100))), lambda address, _: told.append(address), QUICK)
        await monitor.sweep()
        assert sorted(told) == sorted(map(str, range(100)))

    asyncio.run(story())
    assert most == MOST_PROBES


def test_it_goes_on_after_any_exception() -> None:
    errors: list[str] = []
    calls = 0

    async def probe(address: str) -> ProbeOutcome:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise KeyError("a mistake")
        return ProbeOutcome("silent", "late")

    def tell(address: str, outcome: ProbeOutcome) -> None:
        raise ValueError("another one")

    def watched() -> list[str]:
        if calls in (2, 3):
            raise RuntimeError("a third one")
        return ["a"]

    async def story() -> None:
        monitor = Monitor(probe, watched, tell, QUICK, errors.append)
        monitor.start()
        await until(lambda: calls >= 8)
        await monitor.stop()

    asyncio.run(story())
    assert all(any(word in each for each in errors) for word in ("mistake", "another", "third"))


def test_a_hurried_probe_does_not_wait_for_its_turn() -> None:
    async def story() -> None:
        async with stub_servers(1) as (server,):
            found: list[str] = []
            probe = HttpProbe(1.0)
            config = FleetConfig(health_check_interval_seconds=1000)
            monitor = Monitor(probe, lambda: [server.url], lambda _, each: found.append(each.kind), config)
            monitor.start()
            await until(lambda: bool(found))
            await server.kill()
            monitor.hurry(server.url)
            await until(lambda: "closed" in found)
            await monitor.stop()
            await probe.close()

    asyncio.run(story())


def test_started_and_stopped_twenty_times_it_leaves_nothing_behind() -> None:
    async def story() -> None:
        async with stub_servers(4) as servers:
            tasks, threads = len(asyncio.all_tasks()), threading.active_count()
            files = len(os.listdir("/proc/self/fd"))
            for _ in range(20):
                probe = HttpProbe(0.04)
                monitor = Monitor(probe, lambda: [each.url for each in servers], lambda *_: None, QUICK)
                monitor.start()
                await asyncio.sleep(0.01)
                await monitor.stop()
                await probe.close()
            for _ in range(10):  # the servers see their connections end
                await asyncio.sleep(0.01)
            assert len(asyncio.all_tasks()) == tasks
            assert threading.active_count() == threads
            assert len(os.listdir("/proc/self/fd")) <= files

    asyncio.run(story())
