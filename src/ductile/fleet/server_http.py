"""HTTP to one server, and what goes wrong with it as a `Failure`. No text that comes out of here has a key in it.

nobody listens, or the connection is reset      SlotLost     hard evidence
no bytes for longer than a deadline             Late
429, 503                                        NotTaken     another instance may take it, or this one later
other 5xx                                       Interrupted
401, 403                                        Barred       a `Refused`: with this key nothing is asked again
all else that is not 200                        Refused      asked once
"""

import asyncio
import errno
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import httpx

from ductile.concurrency.deadline import said
from ductile.config.server_address import is_address, root_of
from ductile.roles import Failure, Interrupted, Late, NotTaken, Refused, SlotLost

MOST_BYTES = 64 << 20
"""Bytes of one reply, or one event of a stream, at most."""
SHOWN_CHARS = 500
OUR_FAULTS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.EPERM}
)
"""What keeps us from asking anybody: no server is to blame for it."""
KEPT_S = 2.0
"""Seconds that a connection without a request is kept: less than servers do (5 s), which would close it just as it is
used again."""
FIRST_PAUSE_S = 0.8
"""Seconds between the first two attempts to connect; each pause after it is four times as long."""


class Barred(Refused):
    """A server lets nobody in with this key, whatever is asked."""


@dataclass(frozen=True, slots=True)
class ServerDeadlines:
    connect_s: float = 5.0
    state_s: float = 2.0
    control_s: float = 30.0
    """Seconds until a control route must have replied, where nothing else is said."""
    verify_s: float = 300.0
    """Seconds until all buckets of an update are staged, and their digest is known."""
    silence_s: float = 600.0
    """Seconds without a byte of a response; its first token may wait for others' last."""


class ServerHttp:
    def __init__(
        self,
        url: str,
        api_key: str | None,
        control_token: str | None,
        deadlines: ServerDeadlines,
        attempts: int = 1,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """url: root of the server's routes, or that of /v1. control_token: for the control routes, where it is another
        one than the API key. attempts: to connect. Raises ValueError for a URL that is none, or has a key in it."""
        if not is_address(url):
            raise ValueError(f"{url!r} is no address of a server; write http://host:port")
        parsed = httpx.URL(url)
        if parsed.userinfo or parsed.query or parsed.fragment:
            raise ValueError(f"the address of {parsed.host} has more than host, port and path; a key goes into api_key")
        self.root = root_of(str(parsed))
        self.deadlines, self._attempts = deadlines, attempts
        self._secrets = [each.encode() for each in (api_key, control_token) if each]
        self._control = {"Authorization": f"Bearer {control_token}"} if control_token else {}
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEPT_S),
            transport=transport,
            verify=parsed.scheme == "https",  # reading all certificates takes a while
            trust_env=False,  # a proxy between a run and its own server is never meant
        )

    async def __aenter__(self) -> "ServerHttp":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(
        self, method: str, route: str, body: bytes | None = None, deadline_s: float | None = None, control: bool = False
    ) -> bytes:
        """A whole reply. deadline_s: of all of it; None: `control_s`. control: with the control token."""
        url, limit_s = self.root + route, deadline_s or self.deadlines.control_s
        headers = {"Content-Type": "application/json"} | (self._control if control else {})
        try:
            async with asyncio.timeout(limit_s), self._open(method, url, headers, body, limit_s) as response:
                return await self._read(response, url)
        except TimeoutError:
            raise Late(f"{url} did not respond within {said(limit_s)}") from None

    async def events(self, route: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The server-sent events of a response, each a JSON object."""
        url, content = self.root + route, json.dumps({**body, "stream": True}).encode()
        headers, silence_s = {"Content-Type": "application/json"}, self.deadlines.silence_s
        async with self._open("POST", url, headers, content, silence_s) as response:
            if response.status_code != 200:
                await self._read(response, url)
            async for line in _lines(response, url):
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    try:
                        yield self.json(self._without_keys(data), url)
                    except Refused as error:
                        raise Interrupted(str(error)) from None

    def json(self, content: bytes, url: str) -> dict[str, Any]:
        try:
            value = json.loads(content)
            if isinstance(value, dict):
                return cast("dict[str, Any]", value)
        except ValueError:
            pass
        raise Refused(f"{url} did not respond in JSON: {content[:100].decode('utf-8', 'replace')!r}")

    async def _read(self, response: httpx.Response, url: str) -> bytes:
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > MOST_BYTES:
                raise Refused(f"{url} sent more than {MOST_BYTES} bytes")
        said = self._without_keys(bytes(content))
        if response.status_code == 200:
            return said
        text = _message(said)[:SHOWN_CHARS]
        raise _failure(response.status_code, f"{url} responded with {response.status_code}: {text}")

    def _without_keys(self, said: bytes) -> bytes:
        """A server may repeat our keys, and whatever it says may come to be shown."""
        for secret in self._secrets:
            said = said.replace(secret, b"...")
        return said

    def _open(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, silence_s: float
    ) -> "_Opened":
        limits = httpx.Timeout(silence_s, connect=min(silence_s, self.deadlines.connect_s))
        request = self._client.build_request(method, url, headers=headers, content=body, timeout=limits)
        return _Opened(self._client, request, url, self._attempts)


class _Opened:
    """A response that is being read: what goes wrong on the way is a `Failure`."""

    def __init__(self, client: httpx.AsyncClient, request: httpx.Request, url: str, attempts: int) -> None:
        self._client, self._request, self._url, self._attempts = client, request, url, attempts

    async def __aenter__(self) -> httpx.Response:
        pause_s = FIRST_PAUSE_S
        while True:
            self._attempts -= 1
            if self._client.is_closed:
                raise SlotLost(f"{self._url} was not asked: its server has left the fleet")
            try:
                self._response = await self._client.send(self._request, stream=True)
            except httpx.HTTPError as error:
                if not (isinstance(error, httpx.ConnectError) and self._attempts):
                    raise self._failure(error) from None
            else:
                return self._response
            await asyncio.sleep(pause_s)
            pause_s *= 4

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._response.aclose()
        if isinstance(error, httpx.HTTPError):
            raise self._failure(error) from None

    def _failure(self, error: httpx.HTTPError) -> Failure:
        text = str(error) or type(error).__name__
        if isinstance(error, httpx.TimeoutException):
            limits = self._request.extensions["timeout"]
            silent_s = limits["connect" if isinstance(error, httpx.ConnectTimeout) else "read"]
            return Late(f"{self._url} did not respond within {said(silent_s)}")
        if not OUR_FAULTS.isdisjoint(_numbers(error)):
            return NotTaken(f"{self._url} could not be asked: {text}")
        if isinstance(error, httpx.ConnectError):
            return SlotLost(f"{self._url} cannot be reached: {text}")
        return SlotLost(f"the connection to {self._url} was lost: {text}")


def _message(content: bytes) -> str:
    """What an error's body says to a person: OpenAI's form has a message in it."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode("utf-8", "replace")


def _failure(status: int, sentence: str) -> Failure:
    if status in (401, 403):
        return Barred(f"{sentence} (the server wants another API key)")
    if status in (429, 503):
        return NotTaken(sentence)
    return Interrupted(sentence) if status >= 500 else Refused(sentence)


async def _lines(response: httpx.Response, url: str) -> AsyncGenerator[bytes]:
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MOST_BYTES:
            raise Refused(f"{url} sent an event of more than {MOST_BYTES} bytes")


def _numbers(error: BaseException | None) -> Iterator[int]:
    """Numbers of the system's errors behind one of the client's."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno is not None:
            yield error.errno
        error = error.__cause__ or error.__context__
