"""HTTP to one server, and what goes wrong with it as a `Failure`. No text that comes out of here has a key in it.

closed                SlotLost     hard evidence       (the kinds of `transport.http_client.NoReply`)
lost                  Interrupted  it may be our network
silent                Late
unasked, 429, 503     NotTaken     another instance may take it, or this one later
other 5xx             Interrupted
401, 403              Barred       a `Refused`: with this key nothing is asked again
odd, all else         Refused      asked once
"""

import json
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import httpx

from ductile.config.server_address import is_address, root_of
from ductile.roles import Failure, Interrupted, Late, NotTaken, Refused, SlotLost
from ductile.transport.http_client import MOST_BYTES, HttpClient, HttpReply, Kind, NoReply, bearer, read_all

SHOWN_CHARS = 500
FAILURE_OF: dict[Kind, type[Failure]] = {
    "closed": SlotLost, "lost": Interrupted, "silent": Late, "unasked": NotTaken, "odd": Refused,
}  # fmt: skip


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
        self.deadlines = deadlines
        self._secrets = [each.encode() for each in (api_key, control_token) if each]
        self._control = bearer(control_token)
        self._client = HttpClient(api_key, attempts, deadlines.connect_s, parsed.scheme == "https", transport)

    async def __aenter__(self) -> "ServerHttp":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    async def ask(
        self, method: str, route: str, body: bytes | None = None, deadline_s: float | None = None, control: bool = False
    ) -> bytes:
        """Return a whole reply. deadline_s: of all of it; None: `control_s`. control: with the control token."""
        url, limit_s = self.root + route, deadline_s or self.deadlines.control_s
        headers = {"Content-Type": "application/json"} | (self._control if control else {})
        with _failures():
            try:
                reply = await self._client.ask(method, url, limit_s, headers, body)
            except NoReply as error:
                if method != "GET" or error.kind != "lost":
                    raise
                # An old connection says nothing of the server: a new one shows whether anybody listens.
                reply = await self._client.ask(method, url, limit_s, headers, body)
        return self._read(reply, url)

    async def events(self, route: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Yield the server-sent events of a response, each a JSON object."""
        url, content = self.root + route, json.dumps({**body, "stream": True}).encode()
        headers, silence_s = {"Content-Type": "application/json"}, self.deadlines.silence_s
        with _failures():
            async with self._client.open("POST", url, silence_s, headers, content) as response:
                if response.status_code != 200:
                    self._read(HttpReply(response.status_code, await read_all(response)), url)
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

    def _read(self, reply: HttpReply, url: str) -> bytes:
        content = self._without_keys(reply.content)
        if reply.status == 200:
            return content
        text = _message(content)[:SHOWN_CHARS]
        raise _failure(reply.status, f"{url} responded with {reply.status}: {text}")

    def _without_keys(self, said: bytes) -> bytes:
        """Blot out our keys: a server may repeat them, and whatever it says may come to be shown."""
        for secret in self._secrets:
            said = said.replace(secret, b"...")
        return said


@contextmanager
def _failures() -> Generator[None]:
    try:
        yield
    except NoReply as error:
        raise FAILURE_OF[error.kind](str(error)) from None


def _message(content: bytes) -> str:
    """Return what an error's body says to a person: OpenAI's form has a message in it."""
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
            raise NoReply("odd", f"{url} sent an event of more than {MOST_BYTES} bytes")
