"""Servers of a fleet in the test's own event loop: real sockets and HTTP, no engine. And a pool that they are in."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

import msgspec

from ductile.concurrency.listeners import Listeners
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import TopologyMember
from ductile.fleet.servers.server_pool import Warmed
from ductile.fleet.updates.update_parties import UpdateResult
from ductile.messages.updates import ServerState
from ductile.roles import Failure, Refused, SlotLost

DIGEST = "00000000000d1"


class StubServer:
    """Answers GET /fleet/state with `state`, after `delay_s`. A test changes both, and starts and kills it."""

    def __init__(self, model: str = "m", version: int = 0) -> None:
        self.state = ServerState(uuid4().hex, model, version, DIGEST, 0)
        self.delay_s, self.status, self.num_asked = 0.0, 200, 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def says(self, **fields: object) -> None:
        self.state = msgspec.structs.replace(self.state, **fields)

    async def start(self) -> "StubServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def kill(self) -> None:
        """Nobody listens any more, and all connections are closed."""
        if self._server is not None:
            self._server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            self._server = None

    async def restart(self) -> None:
        """Another process at the same address, with the weights of its folder."""
        await self.kill()
        self.says(incarnation=uuid4().hex, version=0, num_sampled=0)
        await self.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /fleet/state "):
                self.num_asked += 1
                await asyncio.sleep(self.delay_s)
                body = msgspec.json.encode(self.state)
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (self.status, len(body), body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()


@asynccontextmanager
async def stub_servers(number: int) -> AsyncGenerator[list[StubServer]]:
    servers = [await StubServer().start() for _ in range(number)]
    try:
        yield servers
    finally:
        for server in servers:
            await server.kill()


class StubPool:
    """Gives weights to stub servers, and notes down what it is told."""

    def __init__(self, servers: Sequence[StubServer], version: int | None = 1) -> None:
        self.version, self.num_others = version, 0
        self.on_ended = Listeners[[InstanceId, Failure | None, float]]()
        self.drain_fails: Failure | None = None
        self.add_fails: Failure | None = None
        self.story: list[str] = []
        self.suspects: dict[InstanceId, str] = {}
        self.on_trial: frozenset[InstanceId] = frozenset()
        self.tokens_at: dict[InstanceId, float] = {}
        self.donors: dict[InstanceId, list[InstanceId]] = {}
        self.may_warm, self.may_drain = asyncio.Event(), asyncio.Event()
        self.may_warm.set()
        self.may_drain.set()
        self._servers = servers

    async def warm(self, server: TopologyMember, donors: Sequence[TopologyMember]) -> Warmed | None:
        version = self.version
        assert version is not None
        self.story.append(f"warm {server.instance} with {version}")
        self.donors[server.instance] = [donor.instance for donor in donors]
        await self.may_warm.wait()
        stub = next(each for each in self._servers if each.url == server.address)
        if stub.state.incarnation != server.incarnation:
            raise SlotLost(f"{server.address} is another process now")
        stub.says(version=version)
        return Warmed(version, DIGEST)

    async def add(self, server: TopologyMember) -> None:
        self.story.append(f"add {server.instance}")
        if self.add_fails is not None:
            raise self.add_fails

    def put_aside(self, server: InstanceId, why: str) -> None:
        self.story.append(f"put aside {server}")

    def readmit(self, server: InstanceId) -> None:
        self.story.append(f"readmit {server}")

    def suspect(self, server: InstanceId, why: str, on_trial: bool) -> None:
        self.suspects = {**self.suspects, server: why}
        self.on_trial = self.on_trial | {server} if on_trial else self.on_trial - {server}

    def heard_at(self, server: InstanceId) -> float:
        return self.tokens_at.get(server, float("-inf"))

    async def update(self, version: int, servers: Sequence[TopologyMember]) -> UpdateResult:
        raise Refused("a stub updates nobody")

    async def drain(self, server: InstanceId, timeout_s: float) -> None:
        self.story.append(f"drain {server}")
        if self.drain_fails is not None:
            raise self.drain_fails
        await self.may_drain.wait()

    async def remove(self, server: InstanceId, why: str) -> None:
        self.story.append(f"remove {server}")


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that within 10 s")
