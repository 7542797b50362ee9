"""A response of one server behind a router: whole, or as a stream of events."""

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack

import httpx

from ductile.fleet.router.routed_servers import Attempt
from ductile.transport.http_client import MOST_BYTES, HttpClient, HttpReply, NoReply, classify, read_all

ABORTED = b'"finish_reason": "abort"'
"""Bytes of a choice that was ended before its time. In JSON they are part of no text, whose quotes have backslashes."""
_NUM_TOKENS = re.compile(rb'"completion_tokens": (\d+)')


class Upstream:
    """A streamed response that has begun, whatever its status."""

    def __init__(self, attempt: Attempt, response: httpx.Response, stack: AsyncExitStack) -> None:
        """stack: closes the response."""
        self.attempt, self.status = attempt, response.status_code
        self._response, self._stack = response, stack
        self._lines = _lines(response)

    @classmethod
    async def open(
        cls, client: HttpClient, attempt: Attempt, url: str, silence_s: float, headers: Mapping[str, str], body: bytes
    ) -> "Upstream":
        """Ask for the response. Raises NoReply and CutOff."""
        stack = AsyncExitStack()
        try:
            async with attempt.watched():
                response = await stack.enter_async_context(client.open("POST", url, silence_s, headers, body))
        except BaseException:
            await stack.aclose()
            raise
        return cls(attempt, response, stack)

    async def next(self) -> bytes | None:
        """Return what the next event says; None at the response's end. Raises NoReply and CutOff."""
        try:
            async with self.attempt.watched():
                async for line in self._lines:
                    if line.startswith(b"data:"):
                        return line[5:].strip()
        except httpx.HTTPError as error:
            raise NoReply(classify(error), f"the stream of {self._response.url} broke off: {error}") from None
        return None

    async def read(self) -> HttpReply:
        """Return the whole response. Raises NoReply and CutOff."""
        try:
            async with self.attempt.watched():
                return HttpReply(self.status, await read_all(self._response))
        except httpx.HTTPError as error:
            raise NoReply(classify(error), f"the response of {self._response.url} broke off: {error}") from None

    async def close(self) -> None:
        """Hang up: the server aborts what it has not sent."""
        await self._stack.aclose()


def num_tokens_of(content: bytes) -> int | None:
    """Return the number of tokens that a whole response says it has."""
    found = _NUM_TOKENS.search(content)
    return int(found[1]) if found else None


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes]:
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MOST_BYTES:
            raise NoReply("odd", f"{response.url} sent an event of more than {MOST_BYTES} bytes")
