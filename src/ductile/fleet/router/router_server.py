"""A router as it is served: from its first line to its last, in the event loop of one process."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from ductile.config.schema.http_server import HttpServerConfig
from ductile.fleet.router.request_router import RequestRouter
from ductile.fleet.router.router_app import create_router_app
from ductile.transport.http_server.listener import uvicorn_settings

PRESSES = (signal.SIGINT, signal.SIGTERM)
HINTS = (signal.SIGUSR1, signal.SIGUSR2)
"""A batch system's notice: it asks, and does not insist."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals alone: `StopSignals` has them."""
        yield


class StopSignals:
    """SIGINT and SIGTERM of this process, and a batch system's notice. The first one asks it to finish what it has; a
    second SIGINT or SIGTERM, to end now."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._is_pressed = False

    def __enter__(self) -> "StopSignals":
        for signum in (*PRESSES, *HINTS):
            asyncio.get_running_loop().add_signal_handler(signum, self._heard, signum)
        return self

    def __exit__(self, *_: object) -> None:
        for signum in (*PRESSES, *HINTS):
            asyncio.get_running_loop().remove_signal_handler(signum)

    def _heard(self, signum: signal.Signals) -> None:
        self.first.set()
        if signum in PRESSES:
            if self._is_pressed:
                self.second.set()
            self._is_pressed = True


async def serve_router(
    router: RequestRouter,
    config: HttpServerConfig,
    listener: socket.socket,
    stop: StopSignals,
    until: Callable[[], Awaitable[object]],
) -> None:
    """Serve until there is a signal, or `until` has returned; then take no connections any more, and let responses end,
    for at most `DRAIN_S`."""
    server = _Server(uvicorn_settings(create_router_app(router, config), config))
    router.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(until()), asyncio.create_task(stop.first.wait())]
    hurrying = asyncio.create_task(_hurry(server, stop))
    try:
        await asyncio.wait([serving, *waits], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
    finally:
        for task in (*waits, hurrying):
            task.cancel()
        await asyncio.gather(*waits, hurrying, return_exceptions=True)
        await router.close()


async def _hurry(server: uvicorn.Server, stop: StopSignals) -> None:
    with suppress(asyncio.CancelledError):
        await stop.second.wait()
        server.force_exit = True
