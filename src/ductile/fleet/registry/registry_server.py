"""A registry over HTTP, small enough to be served by the process that rules the fleet: `ductile rl` does so with
`inference.registry.serve`.

| route | what it is |
|---|---|
| GET /servers | the leases that are being renewed, a list |
| PUT /servers | the body is a server's lease, for `ttl_s` from now |
| DELETE /servers?url=...&incarnation=... | the server has left; nothing happens to the lease of another process there |
| PUT /authority | {"owner", "ttl_s"}: 200 with {"token"} for the one who rules, 409 with {"owner"} for another |

With a token, every route needs `Authorization: Bearer <token>`; without one, a `Host` of this machine, or a web page
could announce a server in its visitor's name (DNS rebinding). Connections have the limits of `ductile inference`: who
says nothing is hung up on.
"""

import asyncio
import hmac
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ductile.config.checks.access import is_loopback
from ductile.config.schema.http_server import HttpServerConfig
from ductile.fleet.registry.registries import MOST_SERVERS
from ductile.messages.server_lease import MOST_BYTES, LeaseError, ServerLease, lease_from
from ductile.transport.http_server.listener import uvicorn_settings
from ductile.transport.http_server.middleware import host_name

TIMEOUT_S = 10.0
"""Seconds that a client has to send a request's headers, again for its body, and to take the response."""
MAX_BODY_BYTES = 1 << 20
"""A body of more bytes is not read to its end; one of more than a lease has is refused before."""
MAX_CONNECTIONS = 256
"""Connections that are open at a time. One more takes the place of the one that has waited longest."""

_Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Rule:
    """Ruler of a registry's fleet. The token goes up with every new ruler."""

    owner: str = ""
    token: int = 0
    until: float = 0.0


class Claim(msgspec.Struct, frozen=True):
    owner: str
    ttl_s: float


class LeaseTable:
    """Leases and rule of a registry, by its own clock."""

    def __init__(
        self, ttl_s: float, clock: Callable[[], float] = time.monotonic, first_token: int | None = None
    ) -> None:
        """first_token: default, the Unix time: a registry that starts again goes on above its old tokens."""
        self._ttl_s, self._clock = ttl_s, clock
        self._leases: dict[str, tuple[ServerLease, float]] = {}
        self._rule = Rule(token=int(time.time()) if first_token is None else first_token)

    @property
    def leases(self) -> list[ServerLease]:
        now = self._clock()
        self._leases = {url: each for url, each in self._leases.items() if each[1] >= now}
        return [lease for lease, _ in self._leases.values()]

    def put(self, lease: ServerLease) -> None:
        """Keep a server's lease for as long as leases last. Raises LeaseError when there are too many."""
        if lease.url not in self._leases and len(self.leases) >= MOST_SERVERS:
            raise LeaseError(f"is one too many: the registry has {MOST_SERVERS}")
        self._leases[lease.url] = (lease, self._clock() + self._ttl_s)

    def remove(self, url: str, incarnation: str) -> None:
        """Remove the process's lease. Nothing happens where a later one has that address."""
        if url in self._leases and self._leases[url][0].incarnation == incarnation:
            del self._leases[url]

    def claim(self, claim: Claim) -> Rule | None:
        """Return the rule of the one who claims it; None while another has it."""
        now = self._clock()
        if claim.owner != self._rule.owner:
            if now < self._rule.until:
                return None
            self._rule = Rule(claim.owner, self._rule.token + 1)
        self._rule.until = now + min(max(claim.ttl_s, 0.0), 3600.0)
        return self._rule

    @property
    def owner(self) -> str:
        return self._rule.owner


def registry_app(book: LeaseTable, token: str | None = None) -> Starlette:
    """Return the registry's routes. token: that every request must have; None: none, for loopback."""

    async def servers(request: Request) -> Response:
        if request.method == "GET":
            return _json(book.leases)
        if request.method == "DELETE":
            query = request.query_params
            book.remove(query.get("url", ""), query.get("incarnation", ""))
            return Response(status_code=204)
        try:
            book.put(lease_from(await _body(request)))
        except LeaseError as error:
            return _json({"error": f"the lease {error}"}, 422)
        return Response(status_code=204)

    async def authority(request: Request) -> Response:
        try:
            claim = msgspec.json.decode(await _body(request), type=Claim)
        except (msgspec.DecodeError, LeaseError) as error:
            return _json({"error": f"no claim: {error}"}, 422)
        rule = book.claim(claim)
        return _json({"token": rule.token}) if rule else _json({"owner": book.owner}, 409)

    def guarded(route: _Endpoint) -> _Endpoint:
        async def call(request: Request) -> Response:
            given = request.headers.get("Authorization", "")
            if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return _json({"error": "the registry's token is missing or another one"}, 401)
            host = request.headers.get("Host", "")
            if token is None and not is_loopback(host_name(host)):
                return _json(
                    {"error": f"a registry without a token is for its own machine, not for {host[:80]!r}"}, 403
                )
            return await route(request)

        return call

    return Starlette(
        routes=[
            Route("/servers", guarded(servers), methods=["GET", "PUT", "DELETE"]),
            Route("/authority", guarded(authority), methods=["PUT"]),
        ]
    )


@asynccontextmanager
async def serve_registry(app: Starlette, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str]:
    """Serve the registry in this event loop; gives its URL. port: 0 takes a free one. Raises OSError."""
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    limits = HttpServerConfig(max_connections=MAX_CONNECTIONS, max_body_bytes=MAX_BODY_BYTES, timeout_s=TIMEOUT_S)
    server = _Server(uvicorn_settings(app, limits, lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    bound, number = listener.getsockname()[:2]
    try:
        yield f"http://[{bound}]:{number}" if ":" in bound else f"http://{bound}:{number}"
    finally:
        server.should_exit = server.force_exit = True
        await serving
        listener.close()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals alone: the process has handlers of its own."""
        yield


async def _body(request: Request) -> bytes:
    """Return what a request brings. Raises LeaseError when that is more than any lease has."""
    content = b""
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > MOST_BYTES:
                raise LeaseError(f"has more than {MOST_BYTES} bytes")
    except ClientDisconnect:
        raise LeaseError("has not come whole") from None
    return content


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
