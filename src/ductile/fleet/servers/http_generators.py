"""OpenAI-compatible servers as `ductile.roles.Generators`: rollouts from servers that keep their own weights, which
nobody watches (`ductile.fleet.servers.server_port` says what they must understand)."""

from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

import httpx

from ductile.concurrency.structured import gather_all
from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.servers.server_http import ServerDeadlines
from ductile.fleet.servers.server_port import ServerPort
from ductile.records import GenerateRequest, Generation, Manifest
from ductile.roles import Refused
from ductile.transport.deadlines import Deadlines

NUM_ATTEMPTS = 3
"""Attempts to connect to a server, before it counts as gone."""
PATIENCE_S = 10.0
"""Seconds that a request waits for a server that takes it."""


class HttpGenerators:
    """`async with HttpGenerators(["http://127.0.0.1:8000/v1"]) as generators:`"""

    def __init__(
        self,
        base_urls: Sequence[str],
        api_key: str | None = None,
        timeout_s: float = 600.0,
        capacity: int = 64,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """timeout_s: without a byte of a response. capacity: requests in flight at a server that says nothing of its
        own. Raises ValueError for a URL that is none."""
        of_server = ServerDeadlines(connect_s=min(10.0, timeout_s), silence_s=timeout_s)
        of_pool = Deadlines(command_s=timeout_s, progress_s=timeout_s, patience_s=PATIENCE_S, group_s=timeout_s)
        self._ports = [
            ServerPort(
                url,
                api_key=api_key,
                deadlines=of_server,
                max_num_seqs=capacity,
                attempts=NUM_ATTEMPTS,
                transport=transport,
            )
            for url in dict.fromkeys(base_urls)
        ]
        self._pool = RemoteGenerators(
            slots=None, instances=(), max_num_seqs=capacity, block_tokens=0, deadlines=of_pool
        )

    async def __aenter__(self) -> "HttpGenerators":
        """Open all servers. Raises SlotLost or Late when one does not respond, Refused when it is no such server."""
        try:
            await gather_all(*(port.open() for port in self._ports))
            for port in self._ports:
                await self._pool.add_server(port)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    @property
    def capacity(self) -> int:
        return self._pool.capacity

    async def generate(self, request: GenerateRequest) -> Generation:
        """Have a server generate. Raises SlotLost, Late, Refused or Interrupted. Cancelling the call aborts the
        request."""
        return await self._pool.generate(request)

    async def receive(self, manifest: Manifest) -> NoReturn:
        """Refuse the version: these servers keep their own weights."""
        raise Refused(
            f"{', '.join(port.url for port in self._ports)}: servers of their own weights cannot receive version "
            f"{manifest.version}"
        )

    async def _close(self) -> None:
        await gather_all(*(port.release() for port in self._ports))
