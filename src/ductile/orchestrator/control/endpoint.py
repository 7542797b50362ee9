"""The run's end of `ductile.orchestrator.control.control`: a line of JSON in, a line of JSON out, one of each a
connection.

It listens on loopback only. A client without the token of the 0600 file is refused, a client that says nothing is hung
up on.
"""

import asyncio
import hmac
import json
import os
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from ductile.disk import write_whole
from ductile.fabric.process import start_time
from ductile.messages.control import (
    VERSION,
    ControlRequest,
    Drained,
    DrainRequest,
    FleetRequest,
    FleetStatus,
    Resized,
    ResizeRequest,
    Response,
    RunFailed,
    RunStatus,
    Status,
    Unfit,
)
from ductile.orchestrator.control.control import FILE, MAX_REQUEST_BYTES

READ_S = 5.0
"""Seconds that a client has to send its request, and to take the response."""
CLOSE_S = 1.0
"""Seconds that requests have that are being served when the run ends."""
MAX_SILENT = 16
"""Connections at most whose request has not come yet. For one more, the one that has been silent for longest is hung up
on: a client that connects and says nothing keeps no other out."""

Respond = Callable[
    [ResizeRequest | Status | FleetRequest | DrainRequest], Awaitable[Resized | RunStatus | FleetStatus | Drained]
]


class Endpoint:
    """`async with Endpoint(folder, respond):` the run can be asked. `respond` raises Unfit or RunFailed."""

    def __init__(self, folder: Path, respond: Respond) -> None:
        self._file, self._respond = folder / FILE, respond
        self._token = secrets.token_hex(32)
        self._talking: set[asyncio.Task[None]] = set()
        self._silent: deque[asyncio.StreamWriter] = deque()
        """Connections whose request has not come yet, the longest silent first."""

    async def __aenter__(self) -> "Endpoint":
        self._server = await asyncio.start_server(self._talk, "127.0.0.1", 0, limit=MAX_REQUEST_BYTES)
        host, port = self._server.sockets[0].getsockname()
        pid = os.getpid()
        machine = socket.gethostname()
        known = {"version": VERSION, "machine": machine, "pid": pid, "started": start_time(pid)}
        said = json.dumps({**known, "host": host, "port": port, "token": self._token})
        write_whole(self._file, f"{said}\n", mode=0o600)
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(FileNotFoundError):
            self._file.unlink()
        self._server.close()
        if self._talking:
            await asyncio.wait(self._talking, timeout=CLOSE_S)
        for task in self._talking:
            task.cancel()
        if self._talking:  # a resize is being taken back, which nothing depends on any more
            await asyncio.wait(self._talking, timeout=CLOSE_S)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talking.add(task)
        task.add_done_callback(self._talking.discard)
        try:
            with suppress(OSError, TimeoutError):
                try:
                    response = await self._serve(reader, writer)
                except asyncio.CancelledError:  # only we cancel this task, when we close
                    response = Response(VERSION, error="the run ended before it had a response")
                writer.write(msgspec.json.encode(response) + b"\n")
                async with asyncio.timeout(READ_S):
                    await writer.drain()
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        if len(self._silent) >= MAX_SILENT:
            self._silent.popleft().close()
        self._silent.append(writer)
        try:
            async with asyncio.timeout(READ_S):
                return await reader.readline()
        finally:
            with suppress(ValueError):  # we have hung up
                self._silent.remove(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Response:
        try:
            line = await self._read(reader, writer)
            request = msgspec.json.decode(line, type=ControlRequest)
        except (ValueError, RecursionError) as error:  # of msgspec, or of a line that is too long
            return _refusal(f"the request is none: {error}")
        if not hmac.compare_digest(request.token.encode(), self._token.encode()):
            return _refusal("the request does not have the run's token")
        if request.version != VERSION:
            return _refusal(f"this run speaks version {VERSION} of the control words, the request is of another")
        try:
            return Response(VERSION, await self._respond(request.ask))
        except Unfit as error:
            return _refusal(str(error))
        except RunFailed as error:
            return Response(VERSION, error=str(error))


def _refusal(sentence: str) -> Response:
    return Response(VERSION, error=sentence, unfit=True)
