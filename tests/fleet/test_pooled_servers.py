"""Servers in a run's pool: which connections are opened for them, and closed."""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import TopologyMember
from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.servers.pooled_servers import PooledServers
from ductile.fleet.servers.server_port import ServerPort
from ductile.fleet.updates.update_parties import ServerHandle, UpdateResult
from ductile.messages.updates import ServerState
from ductile.roles import Refused
from ductile.transport.deadlines import Deadlines

SERVER = TopologyMember(InstanceId("a:1"), "http://a:1", "x", "ready", 1)


class Port:
    """A server's control that opens once it may."""

    def __init__(self) -> None:
        self.may_open, self.is_released = asyncio.Event(), False

    async def open(self) -> ServerState:
        await self.may_open.wait()
        return ServerState("x", "m", 1, "d", 0)

    async def release(self) -> None:
        self.is_released = True


class Updates:
    """Versions that reach nobody, and those who were to get them. Follows `WeightUpdates`."""

    def __init__(self) -> None:
        self.receivers: list[Any] = []

    def before_joiners(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def update(self, version: int, handles: list[Any]) -> UpdateResult:
        self.receivers += handles
        raise Refused("nobody is updated here")

    def leave_out(self, server: InstanceId, why: str) -> None:
        pass


class Case:
    def __init__(self) -> None:
        self.ports: list[Port] = []
        self.updates = Updates()
        pool = RemoteGenerators(None, (), 8, 0, Deadlines.same(5))
        self.members = PooledServers(pool, cast(Any, self.updates), cast(Any, None), self._open)

    def _open(self, server: TopologyMember) -> ServerHandle[ServerPort]:
        self.ports.append(Port())
        control = cast(ServerPort, self.ports[-1])
        return ServerHandle(server.instance, control, server.address, "", server.incarnation)


def test_two_that_need_a_server_at_once_share_one_connection() -> None:
    async def story() -> None:
        case = Case()
        both = [asyncio.create_task(case.members.update(1, [SERVER])) for _ in range(2)]
        await turns()
        for port in case.ports:
            port.may_open.set()
        await asyncio.gather(*both, return_exceptions=True)
        assert len(case.ports) == 1
        assert [handle.control for handle in case.updates.receivers] == 2 * case.ports
        await case.members.remove(SERVER.instance, "it has left")
        assert case.ports[0].is_released

    asyncio.run(asyncio.wait_for(story(), 60))


def test_one_that_is_removed_while_it_is_opened_leaves_no_connection_and_is_no_receiver() -> None:
    async def story() -> None:
        case = Case()
        updating = asyncio.create_task(case.members.update(1, [SERVER]))
        await turns()
        await case.members.remove(SERVER.instance, "it has left")
        (error,) = await asyncio.gather(updating, return_exceptions=True)
        assert isinstance(error, Refused)
        assert case.updates.receivers == []
        assert case.ports[0].is_released

    asyncio.run(asyncio.wait_for(story(), 60))


async def turns() -> None:
    """All that can go on without a port that opens."""
    for _ in range(20):
        await asyncio.sleep(0)
