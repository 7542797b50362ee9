"""A server over a real socket that samples as it is told, and breaks as it is told: no engine, no torch.

A token says of which prompt it is and where it stands, so that one which is lost, doubled or of another prompt shows.
"""

import asyncio
import json
import math
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ductile.messages.updates import ServerState

DIGEST = "00000000000aa"
VOCABULARY = 1 << 30
"""Token ids are below it."""


def token(prompt: int, place: int) -> int:
    """Token that any server samples at this place of the whole sequence."""
    return zlib.crc32(f"{prompt}/{place}".encode()) >> 2


@dataclass
class FakeServer:
    length: int = 8
    """Tokens of a completion, whoever has sampled the first of them."""
    token_s: float = 0.002
    plain: bool = False
    """No control routes, incarnations or versions: as any other OpenAI-compatible server."""
    incarnation: str = "first"
    version: int = 0
    digest: str = DIGEST
    key: str = ""
    at: int = 3
    """Tokens of each stream after which the fault comes."""
    fault: str = ""
    """A case of `_break`, or a status to refuse each completion with."""
    times: int = 1000
    """Requests that meet the fault."""
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    control: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])
    replies: dict[str, Any] = field(default_factory=dict[str, Any])
    """Replies of control routes: (status, body), or a function that is awaited for one."""
    num_aborted: int = 0
    """Streams that their client has left."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def state(self) -> ServerState:
        return ServerState(self.incarnation, "model", self.version, self.digest, 0, max_num_seqs=4)

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator["FakeServer"]:
        self._gone: dict[asyncio.StreamWriter, Callable[[], bool]] = {}
        """Tells of each connection whether its client has left."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self.die()

    def die(self) -> None:
        """As kill -9 does: nobody listens any more, and all connections are reset."""
        self._server.close()
        for writer in list(self._gone):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._gone[writer] = reader.at_eof
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._respond(first.split(" ")[1], headers, json.loads(content or b"{}"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._gone.pop(writer)
            writer.close()

    async def _respond(
        self, route: str, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            given = headers.get("authorization", "nothing")
            await self._reply(writer, 401, {"error": f"{given} is not the key"})
        elif route == "/v1/completions":
            self.bodies.append(body)
            await self._complete(body, writer)
        elif route == "/v1/models" and route not in self.replies:
            model: dict[str, Any] = {"id": "tiny", "weight_version": self.version}
            await self._reply(
                writer, 200, {"data": [model if self.plain else model | {"incarnation": self.incarnation}]}
            )
        elif route == "/fleet/state" and not self.plain and route not in self.replies:
            await self._reply(writer, 200, msgspec.to_builtins(self.state))
        else:
            self.control.append((route, body))
            reply = self.replies.get(route, (404, {"error": "no such route"}))
            status, said = await reply() if callable(reply) else reply
            await self._reply(writer, status, said)

    async def _reply(self, writer: asyncio.StreamWriter, status: int, said: Any) -> None:
        content = json.dumps(said).encode() if not isinstance(said, bytes) else said
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.times -= bool(self.fault)
        fault = self.fault if self.times >= 0 else ""
        if fault.isdigit():
            await self._reply(writer, int(fault), {"error": "not now"})
            return
        prompt, first = body["prompt"][0], len(body["prompt"])
        end = min(first + body["max_tokens"], 1 + self.length)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n")
        for number, place in enumerate(range(first, end)):
            if number == self.at and fault and await self._break(fault, writer):
                return
            await asyncio.sleep(self.token_s)
            if writer.is_closing() or self._gone[writer]():
                self.num_aborted += 1
                return
            ending = None if place + 1 < end else "stop" if end == 1 + self.length else "length"
            self._send(writer, self._chunk([token(prompt, place)], ending))
            with suppress(ConnectionError):
                await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _chunk(self, tokens: list[int], ending: str | None) -> dict[str, Any]:
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": [-0.5] * len(tokens)}, "finish_reason": ending}
        if self.plain:
            return {"choices": [choice]}
        spans = [[self.version, self.digest, len(tokens)]] if tokens else []
        return {"incarnation": self.incarnation, "choices": [choice | {"weight_versions": spans}]}

    async def _break(self, fault: str, writer: asyncio.StreamWriter) -> bool:
        """True: the stream is over."""
        match fault:
            case "die":
                self.die()
            case "reset":
                writer.transport.abort()
            case "hang":
                with suppress(TimeoutError):
                    await asyncio.sleep(60)
            case "error":
                self._send(writer, {"error": {"message": f"this request of {self.key} failed"}})
                writer.write(b"0\r\n\r\n")
            case "garbage":
                self._send(writer, {"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [0.0]}}]})
            case "abort":
                self._send(writer, self._chunk([], "abort"))
                writer.write(b"0\r\n\r\n")
            case "text":
                self._send(writer, {"choices": [{"text": "hello", "logprobs": {"token_logprobs": [0.0]}}]})
            case "beyond" | "negative":
                self._send(writer, self._chunk([2_000_000_000 if fault == "beyond" else -7], None))
            case "nan" | "minus_inf" | "positive":
                chunk = self._chunk([1], None)
                wrong = {"nan": math.nan, "minus_inf": -math.inf, "positive": 3.5}[fault]
                chunk["choices"][0]["logprobs"]["token_logprobs"] = [wrong]
                self._send(writer, chunk)
            case "more":
                self._send(writer, self._chunk([1] * 1000, None))
            case "restart":
                self.incarnation = "second"
                return False
            case "commit":
                self.version, self.digest = self.version + 1, "00000000000bb"
                return False
            case _:
                raise AssertionError(fault)
        return True

    def _send(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        data = f"data: {json.dumps(event)}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


Reply = Callable[[], Awaitable[tuple[int, Any]]]
