"""Client for HTTP, each request with a deadline. Where there is no reply, the reason is one of five kinds:

closed    nobody listens at the address, or this client is closed
lost      the connection was lost, or there is no way there
silent    no bytes for longer than a deadline: a stopped process still takes connections
unasked   something keeps us from asking anybody: no server is to blame for it
odd       more bytes than anybody may send
"""

import asyncio
import errno
import ssl
from collections.abc import Iterator, Mapping
from functools import cache
from types import TracebackType
from typing import Literal, NamedTuple, cast

import httpx

from ductile.concurrency.deadline import said

MOST_BYTES = 64 << 20
"""Bytes of one reply, or one event of a stream, at most."""
OWN_FAULTS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.EPERM}
)
KEPT_S = 2.0
"""Seconds that a connection without a request is kept: less than servers do (5 s), which would close it just as it is
used again."""
FIRST_PAUSE_S = 0.8
"""Seconds between the first two attempts to connect; each pause after it is four times as long."""

Kind = Literal["closed", "lost", "silent", "unasked", "odd"]


class NoReply(Exception):
    """A request has no reply that can be read. The text is a sentence that begins with the URL."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind: Kind = kind


class HttpReply(NamedTuple):
    status: int
    content: bytes


class HttpClient:
    """Client of one event loop; `close` it there."""

    def __init__(
        self,
        key: str | None = None,
        attempts: int = 1,
        connect_s: float = 5.0,
        verify: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """key: bearer token of requests that have no other. attempts: to connect. verify: check certificates; reading
        all of them takes a while."""
        self._attempts, self._connect_s = attempts, connect_s
        self._client = httpx.AsyncClient(
            headers=bearer(key),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEPT_S),
            transport=transport,
            verify=trusted() if verify else False,
            trust_env=False,  # a proxy between a run and its own server is never meant
        )

    async def ask(
        self,
        method: str,
        url: str,
        deadline_s: float,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> HttpReply:
        """A whole reply, whatever its status. deadline_s: of all of it. Raises NoReply."""
        try:
            async with (
                asyncio.timeout(deadline_s),
                self.open(method, url, deadline_s, headers, body) as response,
            ):
                return HttpReply(response.status_code, await read_all(response, most_bytes))
        except TimeoutError:
            raise NoReply("silent", f"{url} did not respond within {said(deadline_s)}") from None

    def open(
        self,
        method: str,
        url: str,
        silence_s: float,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> "OpenReply":
        """A reply that is read as it comes. silence_s: seconds without a byte of it. Raises NoReply, also meanwhile."""
        limits = httpx.Timeout(silence_s, connect=min(silence_s, self._connect_s))
        request = self._client.build_request(method, url, headers=headers, content=body, timeout=limits)
        return OpenReply(self._client, request, url, self._attempts)

    async def close(self) -> None:
        await self._client.aclose()


class OpenReply:
    """`async with client.open(...) as response:`."""

    def __init__(self, client: httpx.AsyncClient, request: httpx.Request, url: str, attempts: int) -> None:
        self._client, self._request, self._url, self._attempts = client, request, url, attempts

    async def __aenter__(self) -> httpx.Response:
        pause_s = FIRST_PAUSE_S
        while True:
            self._attempts -= 1
            if self._client.is_closed:
                raise NoReply("closed", f"{self._url} is not asked any more: its client is closed")
            try:
                self._response = await self._client.send(self._request, stream=True)
            except (httpx.HTTPError, OSError) as error:
                if not (isinstance(error, httpx.ConnectError) and self._attempts):
                    raise self._no_reply(error) from None
            else:
                return self._response
            await asyncio.sleep(pause_s)
            pause_s *= 4

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._response.aclose()
        if isinstance(error, httpx.HTTPError):
            raise self._no_reply(error) from None

    def _no_reply(self, error: Exception) -> NoReply:
        text, kind = str(error) or type(error).__name__, classify(error)
        if kind == "silent":
            limits = self._request.extensions["timeout"]
            silent_s = limits["connect" if isinstance(error, httpx.ConnectTimeout) else "read"]
            return NoReply(kind, f"{self._url} did not respond within {said(silent_s)}")
        if kind == "unasked":
            return NoReply(kind, f"{self._url} could not be asked: {text}")
        if isinstance(error, httpx.ConnectError):
            return NoReply(kind, f"{self._url} cannot be reached: {text}")
        return NoReply(kind, f"the connection to {self._url} was lost: {text}")


@cache
def trusted() -> ssl.SSLContext:
    """Return whom clients trust to be who they say, by HTTPS: certificates in the file or folder that `SSL_CERT_FILE`
    or `SSL_CERT_DIR` name, such as a server's own; without them the usual authorities."""
    return httpx.create_ssl_context()


def bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def classify(error: BaseException) -> Kind:
    """Return what an error of the client's, or of a socket, says of the server that was asked."""
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return "silent"
    numbers = {*_error_numbers(error)}
    if errno.ECONNREFUSED in numbers:
        return "closed"  # also where another of its addresses has no way there, such as that of IPv6
    return "unasked" if numbers & OWN_FAULTS else "lost"


async def read_all(response: httpx.Response, most_bytes: int = MOST_BYTES) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > most_bytes:
            raise NoReply("odd", f"{response.url} sent more than {most_bytes} bytes")
    return bytes(content)


def _error_numbers(error: BaseException | None) -> Iterator[int]:
    """Return the numbers of the system's errors behind an error of the client's."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, OSError) and one.errno is not None:
            yield one.errno
        if isinstance(one, BaseExceptionGroup):
            pending.extend(cast("BaseExceptionGroup[BaseException]", one).exceptions)
        pending.extend((one.__cause__, one.__context__))
