"""Servers behind a router, in the test's own event loop: real sockets, and completions that a test thinks up."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from uuid import uuid4

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ductile.config.schema.cluster import RouterPolicy
from ductile.config.schema.fleet import HealthCheckConfig
from ductile.fleet.registry.registry_server import serve_registry
from ductile.fleet.router.request_router import RequestRouter
from ductile.fleet.router.routed_servers import RoutedServers
from ductile.messages.updates import ServerState

WITHIN_S, LOOK_S = 60, 0.01
HEALTH = HealthCheckConfig(health_check_interval_seconds=0.2, probe_timeout_seconds=0.15)


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(int(WITHIN_S / LOOK_S)):
        if condition():
            return
        await asyncio.sleep(LOOK_S)
    raise AssertionError("it did not happen")


@dataclass
class StubReplica:
    """Answers `max_tokens` tokens: the numbers from the prompt's length on, as text "<n>"."""

    name: str
    url: str = ""
    breaks_after: int | None = None
    """Tokens after which it hangs up, once."""
    status: int = 200
    is_mute: bool = False
    """It takes connections, and says nothing."""
    state: ServerState = field(default_factory=lambda: ServerState(uuid4().hex, "m", 0, "", 0, max_model_len=100))
    bodies: list[dict[str, object]] = field(default_factory=list[dict[str, object]])

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/fleet/state", self._state, methods=["GET"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _state(self, http: Request) -> Response:
        await self._be_mute()
        return Response(msgspec.json.encode(self.state), media_type="application/json")

    async def _be_mute(self) -> None:
        await eventually(lambda: not self.is_mute)

    async def _complete(self, http: Request) -> Response:
        body = await http.json()
        self.bodies.append(body)
        await self._be_mute()
        if self.status != 200:
            return JSONResponse({"error": {"message": f"{self.name} says {self.status}"}}, self.status)
        prompt = body.get("prompt", [1, 2, 3])
        tokens = [len(prompt) + number for number in range(body["max_tokens"])]
        if not body.get("stream"):
            usage = {"completion_tokens": len(tokens)}
            return JSONResponse({"id": self.name, "usage": usage, "choices": [{"index": 0, "text": _text(tokens)}]})
        is_chat = "messages" in body
        return StreamingResponse(self._chunks(prompt, tokens, is_chat), media_type="text/event-stream")

    async def _chunks(self, prompt: list[int], tokens: list[int], is_chat: bool) -> AsyncGenerator[str]:
        for number, token in enumerate(tokens):
            if number == self.breaks_after:
                self.breaks_after = None
                raise ConnectionResetError
            said = {"delta": {"content": _text([token])}} if is_chat else {"text": _text([token])}
            reason = "length" if number == len(tokens) - 1 else None
            choice = {"index": 0, **said, "token_ids": [token], "finish_reason": reason}
            ids = {"prompt_token_ids": prompt} if number == 0 else {}
            yield f"data: {json.dumps({'id': self.name, **ids, 'choices': [choice]})}\n\n"
            await asyncio.sleep(0)
        yield "data: [DONE]\n\n"


def _text(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


@asynccontextmanager
async def routed(*stubs: StubReplica, policy: RouterPolicy = "least_tokens") -> AsyncGenerator[RequestRouter]:
    """A router before these, all of which serve."""
    async with AsyncExitStack() as stack:
        servers = RoutedServers(HEALTH, policy, lambda url: None, lambda said: None)
        router = RequestRouter(servers)
        stack.push_async_callback(router.close)
        for stub in stubs:
            stub.url = await stack.enter_async_context(serve_registry(stub.app()))
            servers.add(stub.url)
        router.start()
        await servers.wait_for_all(20)
        yield router
