"""Checks of a request before any of its body is read, and the reading of the body within bounds.

| in this order | else |
|---|---|
| with no API key: a `Host` of this machine, or a web page could ask in its visitor's name (DNS rebinding) | 403 |
| with an API key: `Authorization: Bearer <key>`, except to GET a probe | 401 |
| with none, of a control route: `Authorization: Bearer <control token>` | 401 |
| of a POST: JSON, of an announced length within `server.max_body_bytes`, framed in one way | 415, 413, 400 |
| its body, within `server.max_body_bytes` and `server.timeout_s` | 413, 408 |

Whoever asks for a bucket of a lease, or for a prompt's keys and values, knows the lease's name, and needs nothing else.
A bucket that comes is bytes, as many as one of the update that is under way may have; what else comes to a control
route, at most `MAX_CONTROL_BYTES`.

Bodies that are on their way share `BODIES_AT_ONCE` times the largest; when that is full, the one that holds most of it
goes (503), so that a client who asks little is always served. Buckets are as many as the trainer has ranks, and none
goes: `BODIES_AT_ONCE` of them are read and loaded, and the rest wait unread.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ductile.config.checks.access import is_loopback
from ductile.config.schema.http_server import HttpServerConfig
from ductile.messages.control_token import ControlToken
from ductile.transport.http_server.openai_error import error

REFUSALS = __name__
"""Name of the logger that tells of refused keys and tokens: strangers cause its lines, so it needs a limit."""
LOG = logging.getLogger(REFUSALS)

PROBES = frozenset({"/health", "/liveness"})

CONTROL = frozenset({"/pause", "/resume"})
"""Control routes, beside all below `WEIGHTS`."""
WEIGHTS, BUCKETS = "/weights/", "/weights/buckets/"
KV = "/kv/"
"""Keys and values of a prompt, for the server that goes on with it: below it, the name of a lease."""

MAX_CONTROL_BYTES = 64 * 2**20
"""Most bytes of a message to a control route: one that names all boxes of a large model has some megabytes."""

BODIES_AT_ONCE = 8

CLOSE = {"Connection": "close"}


class Refusal(Exception):
    """A request does not get in, for the reason that HTTP says."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.response = JSONResponse(error(message, type), status, headers)


class RequestGuard:
    """ASGI middleware. The body of a POST that comes in is `scope["state"]["body"]`, all of it."""

    def __init__(
        self, app: ASGIApp, config: HttpServerConfig, control: ControlToken | None, bucket_bytes: Callable[[], int]
    ) -> None:
        """control: None for an app without control routes."""
        self._app, self._config, self._control, self._bucket_bytes = app, config, control, bucket_bytes
        self._bodies, self._control_bodies = Bodies(config.timeout_s), Bodies(config.timeout_s)
        self._buckets = asyncio.Semaphore(BODIES_AT_ONCE)
        """Held by each bucket until it is loaded."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            path, headers = scope["path"], Headers(scope=scope)
            check_access(path, scope["method"], headers, self._config, self._control)
            if scope["method"] == "POST":
                kind, most_bytes = self._may_be(path)
                check_body(headers, kind, most_bytes)
                if path.startswith(BUCKETS):
                    async with self._turn():
                        return await self._serve(scope, receive, send, Bodies(self._config.timeout_s), most_bytes)
                bodies = self._control_bodies if self._is_control(path) else self._bodies
                return await self._serve(scope, receive, send, bodies, most_bytes)
        except Refusal as refusal:
            if refusal.response.status_code == 401:
                LOG.warning("refused: %s %.80r of %s: %s", scope["method"], scope["path"], _client(scope), refusal)
            await refusal.response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, bodies: "Bodies", most_bytes: int) -> None:
        body = await bodies.read(receive, most_bytes)
        if body is None:
            return  # the client went away
        scope.setdefault("state", {})["body"] = body
        del body  # the handler that takes it out of the state can forget it
        await self._app(scope, receive, send)

    @asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None]:
        """Wait for a bucket's turn to be read and loaded. Raises `Refusal` when it has not come in
        `server.timeout_s`."""
        try:
            await asyncio.wait_for(self._buckets.acquire(), self._config.timeout_s)
        except TimeoutError:
            raise _crowded("there are too many buckets at once; try again later") from None
        try:
            yield
        finally:
            self._buckets.release()

    def _may_be(self, path: str) -> tuple[str, int]:
        """Return the type and the most bytes of a body."""
        if path.startswith(BUCKETS):
            return "application/octet-stream", self._bucket_bytes() or MAX_CONTROL_BYTES
        return "application/json", MAX_CONTROL_BYTES if self._is_control(path) else self._config.max_body_bytes

    def _is_control(self, path: str) -> bool:
        return self._control is not None and is_control(path)


def is_control(path: str) -> bool:
    return path.startswith(WEIGHTS) or path in CONTROL


def check_access(
    path: str, method: str, headers: Headers, config: HttpServerConfig, control: ControlToken | None
) -> None:
    """Raise `Refusal` for a request of somebody who may not ask for this. control: None for an app without control
    routes."""
    is_probe = method in ("GET", "HEAD") and path in PROBES  # of a POST the body would be read
    if config.api_key is None:
        host = headers.get("host")
        if host is not None and not is_loopback(host_name(host)):
            raise Refusal(
                403,
                f"the Host header is {host[:80]!r}; without server.api_key this server serves only requests to its "
                f"own machine's names: ask for {config.host}, or set server.api_key",
                "permission_error",
            )
    knows_lease = (method == "GET" and path.startswith(BUCKETS)) or (
        method in ("GET", "DELETE") and path.startswith(KV)
    )
    if is_probe or knows_lease:
        return
    if config.api_key is not None:
        _check_key(headers, config.api_key, "its API key: Authorization: Bearer <server.api_key>")
    elif control is not None and is_control(path):
        check_control(headers, config, control)


def check_control(headers: Headers, config: HttpServerConfig, control: ControlToken) -> None:
    """Raise `Refusal` for a request of somebody who may not control the server: without its API key, or, where there is
    none, without its control token."""
    if config.api_key is not None:
        _check_key(headers, config.api_key, "its API key: Authorization: Bearer <server.api_key>")
        return
    kept = f", which is in {control.file}" if control.file else ""
    _check_key(headers, control.text, f"its control token for this: Authorization: Bearer <token>{kept}")


def _check_key(headers: Headers, wanted: str, where: str) -> None:
    if not _has_key(headers.get("authorization", ""), wanted):
        raise Refusal(401, f"this server needs {where}", "authentication_error", {"WWW-Authenticate": "Bearer"})


def check_body(headers: Headers, kind: str, most_bytes: int) -> None:
    """Raise `Refusal` for a body that a request's head gives reason to refuse."""
    if "content-length" in headers and "transfer-encoding" in headers:
        raise Refusal(
            400, "Content-Length and Transfer-Encoding contradict each other; send one of them", headers=CLOSE
        )
    if headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        said = "JSON" if kind == "application/json" else "bytes"
        raise Refusal(415, f"the body must be {said}: Content-Type: {kind}")
    if int(headers.get("content-length", "0")) > most_bytes:
        raise _too_large(most_bytes)


def host_name(host: str) -> str:
    """Return the name in a Host header, without the port and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _client(scope: Scope) -> str:
    return ":".join(map(str, scope["client"])) if scope.get("client") else "somebody"


def _has_key(authorization: str, api_key: str) -> bool:
    scheme, _, key = authorization.partition(" ")
    # Header bytes come as Latin-1 characters, one each.
    right = hmac.compare_digest(key.strip().encode("latin-1"), api_key.encode())
    return right and scheme.lower() == "bearer"


def _too_large(most_bytes: int) -> Refusal:
    return Refusal(413, f"the body has more than {most_bytes} bytes; raise server.max_body_bytes, or send less")


def _crowded(message: str) -> Refusal:
    return Refusal(503, message, "server_error", CLOSE | {"Retry-After": "1"})


class Bodies:
    """Reads the bodies of requests, and bounds what all that are on their way take together."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._num_bytes: dict[asyncio.Timeout, int] = {}
        """Bytes that have come of each body that is being read, by the deadline of its reading."""

    async def read(self, receive: Receive, most_bytes: int) -> bytearray | None:
        """Return a whole body; None when the client goes away before its end. Raises `Refusal`."""
        deadline = asyncio.timeout(self._timeout_s)
        chunks: list[bytes] = []
        try:
            async with deadline:
                self._num_bytes[deadline] = 0
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    if deadline not in self._num_bytes:
                        raise TimeoutError
                    chunks.append(message.get("body", b""))
                    self._num_bytes[deadline] += len(chunks[-1])
                    if self._num_bytes[deadline] > most_bytes:
                        raise _too_large(most_bytes)
                    if not message.get("more_body", False):
                        return bytearray().join(chunks)
                    self._make_room(BODIES_AT_ONCE * most_bytes)
        except TimeoutError:
            if deadline not in self._num_bytes:  # it made room
                raise _crowded("there are too many large requests at once; try again later") from None
            raise Refusal(408, f"the body did not come within {self._timeout_s:g} s", headers=CLOSE) from None
        finally:
            self._num_bytes.pop(deadline, None)

    def _make_room(self, most_bytes: int) -> None:
        """End the reading of the largest bodies, until the rest fit."""
        while sum(self._num_bytes.values()) > most_bytes:
            largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
            del self._num_bytes[largest]
            if not largest.expired():
                largest.reschedule(asyncio.get_running_loop().time())
