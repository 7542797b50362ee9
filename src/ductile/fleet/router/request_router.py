"""Finds a server for each request, and another one where that fails.

1. A request goes to a server that is well, by the policy (`RoutedServers.choose`).
2. Where the server fails before anything is with the client, the request is asked again of another one: it has not
   happened. A stream with one choice goes on from the tokens that have come (`PartialStream`); any other ends with an
   error in it.
3. A server that says that it takes nothing (503) has not failed. When all say so, the client hears it. When there is no
   server at all, the request waits for one, at most `PATIENCE_S`.
4. What a server refuses (4xx) another one would refuse, too: the client gets its words.

With servers that compute prompts, one of these is asked first; where none can, the server that goes on with the prompt
computes it itself.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ductile.fleet.router.partial_stream import PartialStream, StreamFailed, can_be_carried
from ductile.fleet.router.routed_request import CHAT, COMPLETIONS, RoutedRequest
from ductile.fleet.router.routed_servers import Attempt, CutOff, RoutedServer, RoutedServers
from ductile.fleet.router.router_metrics import RouterMetrics
from ductile.fleet.router.upstream import ABORTED, Upstream, num_tokens_of
from ductile.transport.http_client import HttpClient, HttpReply, NoReply, bearer
from ductile.transport.http_server.openai_error import error

PATIENCE_S = 30.0
"""Seconds that a request waits for a server, while there is none."""
AGAIN_S = 0.2
"""Seconds until servers that have failed at a request are asked it again, where there is no other."""
RESPONSE_S = 3600.0
"""Longest time without a byte of a response. Whether a server hangs, probes say much sooner."""
RELEASE_S = 5.0
"""Longest time that a server may take to let a prompt's keys and values go."""
MOST_FAILURES = 2
"""Servers that a request may make fail (500), before it is the request that is at fault."""
DONE = b"data: [DONE]\n\n"

Fields = dict[str, Any]


class NoServer(Exception):
    """There is no server for a request. The text is for the client."""


@dataclass(slots=True)
class _Search:
    """The servers that have had a request, and what they said."""

    request: RoutedRequest
    until: float
    tried: set[str] = field(default_factory=set[str])
    num_failures: int = 0
    last: HttpReply | None = None
    """Latest reply by which a server did not take it."""


@dataclass(slots=True)
class _Begun:
    """A stream that has begun, and its first event."""

    upstream: Upstream
    first: bytes
    books: ExitStack
    """Closes the attempt."""

    async def close(self) -> None:
        self.books.close()
        await self.upstream.close()


class _Streamed(StreamingResponse):
    def __init__(self, events: AsyncGenerator[bytes], begun: _Begun) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._begun = begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._begun.close()  # a client may have gone before the first event was asked for


class RequestRouter:
    """Made in the loop that routes; `close` there."""

    def __init__(
        self,
        servers: RoutedServers,
        prefill: RoutedServers | None = None,
        least_prefill_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """prefill: servers that compute prompts for those of `servers`. least_prefill_tokens: of a prompt that is
        worth that."""
        self.servers, self.prefill = servers, prefill
        self.metrics = RouterMetrics(lambda: [each for one in self._all for each in one.all.values()])
        self._least_prefill_tokens, self._clock = least_prefill_tokens, clock
        self._client = HttpClient()
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def _all(self) -> list[RoutedServers]:
        return [self.servers] if self.prefill is None else [self.servers, self.prefill]

    def start(self) -> None:
        for each in self._all:
            each.start()

    async def close(self) -> None:
        await asyncio.gather(*(each.stop() for each in self._all), *self._releases, return_exceptions=True)
        await self._client.close()

    async def respond(self, request: RoutedRequest) -> Response:
        """Return the response of a server. Raises NoServer."""
        began_at = self._clock()
        fields = await self._prefilled(request)
        if not request.is_stream:
            try:
                return await self._whole(request, fields)
            finally:
                self._release(fields)
                self.metrics.request_s.observe(self._clock() - began_at)
        partial = PartialStream(request, lambda: self.servers.max_model_len) if can_be_carried(request) else None
        search = self._search(request)
        try:
            begun = await self._begin(search, partial, fields)
        except BaseException:
            self._release(fields)
            raise
        self._release(fields)  # the server has taken it over
        if isinstance(begun, HttpReply):
            return _response(begun)
        return _Streamed(self._stream(search, begun, partial, began_at), begun)

    async def get(self, path: str) -> Response:
        """Return what one of the servers says of itself. Raises NoServer."""
        search = self._search(RoutedRequest(path, b""))
        while (chosen := await self._next(search)) is not None:
            try:
                reply = await self._client.ask("GET", chosen.url + path, RELEASE_S, bearer(chosen.key))
            except NoReply:
                search.tried.add(chosen.url)
            else:
                return _response(reply)
        raise NoServer(self._why_none())

    # -- Whole responses --------------------------------------------------------------------------------------------

    async def _whole(self, request: RoutedRequest, fields: Fields) -> Response:
        search, content = self._search(request), request.with_fields(**fields) if fields else request.content
        while (chosen := await self._next(search)) is not None:
            with self.servers.attempt(chosen, request) as attempt:
                try:
                    reply = await self._ask(attempt, chosen, request.route, content)
                except (NoReply, CutOff) as why:
                    self._failed(attempt, why)
                except asyncio.CancelledError:
                    self._count(attempt, "gone")
                    raise
                else:
                    if self._is_taken(search, attempt, reply):
                        return _response(reply)
            self._turn_away(search, chosen)
        return self._without(search)

    async def _ask(self, attempt: Attempt, chosen: RoutedServer, route: str, content: bytes) -> HttpReply:
        """Return a server's whole response; wait for it no longer than the server is there. Raises NoReply or
        CutOff."""
        async with attempt.watched():
            return await self._client.ask("POST", chosen.url + route, RESPONSE_S, _headers(chosen), content)

    # -- Streams ----------------------------------------------------------------------------------------------------

    async def _begin(self, search: _Search, partial: PartialStream | None, fields: Fields) -> _Begun | HttpReply:
        """Return a stream of which the first event is there, or the reply of a server that refuses."""
        request = search.request
        while (chosen := await self._next(search)) is not None:
            route, content = request.route, request.content
            if partial is not None:
                route, content = partial.next_body(**fields)
            elif fields:
                content = request.with_fields(**fields)
            books, upstream = ExitStack(), None
            attempt = books.enter_context(self.servers.attempt(chosen, request))
            try:
                upstream = await Upstream.open(
                    self._client, attempt, chosen.url + route, RESPONSE_S, _headers(chosen), content
                )
                if upstream.status == 200:
                    if (first := await upstream.next()) is None:
                        raise NoReply("lost", f"the stream of {chosen.url} ended before it began")
                    begun, upstream = _Begun(upstream, first, books.pop_all()), None
                    return begun
                reply = await upstream.read()
                if self._is_taken(search, attempt, reply):
                    return reply
            except (NoReply, CutOff) as why:
                self._failed(attempt, why)
            except asyncio.CancelledError:
                self._count(attempt, "gone")
                raise
            finally:
                books.close()
                if upstream is not None:
                    await upstream.close()
            self._turn_away(search, chosen)
        if search.last is not None:
            return search.last
        self.metrics.unserved.inc()
        raise NoServer(self._why_none())

    async def _stream(
        self, search: _Search, begun: _Begun, partial: PartialStream | None, began_at: float
    ) -> AsyncGenerator[bytes]:
        """Yield the events of a response, of one server after the other where the first ones are lost."""
        data: bytes | None = begun.first
        num_events, outcome = 0, "gone"
        try:
            while True:
                attempt = begun.upstream.attempt
                try:
                    if data is None:
                        raise NoReply("lost", f"the stream of {attempt.url} ended without its end")
                    if data == b"[DONE]":
                        break
                    num_events += 1
                    yield data_event(data) if partial is None else _rewritten(partial, data)
                    self.servers.heard(attempt, search.request, partial.num_tokens if partial else num_events)
                    if partial is not None and partial.is_aborted:
                        raise StreamFailed(f"{attempt.url} ended the response before its time")
                    data = await begun.upstream.next()
                except (NoReply, CutOff, StreamFailed) as why:
                    self._failed(attempt, why)
                    await begun.close()
                    if partial is not None and (partial.finish_reason or partial.num_left <= 0):
                        for chunk in partial.last_chunks():
                            yield data_event(json.dumps(chunk).encode())
                        outcome = ""
                        break
                    following = await self._follow(search, attempt, partial)
                    if not isinstance(following, _Begun):
                        yield data_event(json.dumps(error(f"{why}; {following}", "server_error")).encode())
                        outcome = ""
                        break
                    begun, data = following, following.first
            if outcome:
                outcome = "done"
            yield DONE
        finally:
            attempt = begun.upstream.attempt
            if outcome == "done":
                self.servers.ended(attempt, partial.num_tokens if partial else None)
            if outcome:
                self._count(attempt, outcome)
            self.metrics.request_s.observe(self._clock() - began_at)
            await begun.close()

    async def _follow(self, search: _Search, attempt: Attempt, partial: PartialStream | None) -> _Begun | str:
        """Return another server's stream, which goes on with a response, or a sentence why there is none. It computes
        the prompt itself, as the one that was lost had taken over what another had computed of it."""
        if partial is None:
            return "a response of several choices, or with calls of tools, is not begun again"
        search.tried, search.last = {attempt.url}, None
        search.until = self._clock() + PATIENCE_S
        self.metrics.carried.labels(attempt.url).inc()
        try:
            following = await self._begin(search, partial, {})
        except NoServer as none:
            return str(none)
        if isinstance(following, _Begun):
            return following
        return f"another server did not go on with it: {following.content[:200].decode(errors='replace')}"

    # -- Prompts that are computed apart ----------------------------------------------------------------------------

    async def _prefilled(self, request: RoutedRequest) -> Fields:
        """Return the fields by which a server finds the keys and values of the prompt; none where no server that
        computes prompts has them."""
        is_apart = request.route in (COMPLETIONS, CHAT) and request.num_prompts == 1 and not request.body.get("echo")
        if self.prefill is None or not is_apart or request.num_prompt_tokens < self._least_prefill_tokens:
            return {}
        work = replace(request, num_sequences=1, max_tokens=max(1, request.num_prompt_tokens))
        content, tried = request.with_fields(kv_transfer_params={"do_remote_decode": True}), set[str]()
        while (chosen := self.prefill.choose(work, tried)) is not None:
            tried.add(chosen.url)
            with self.prefill.attempt(chosen, work) as attempt:
                try:
                    reply = await self._ask(attempt, chosen, request.route, content)
                except (NoReply, CutOff) as why:
                    self.metrics.prefills.labels(chosen.url, "failed").inc()
                    self.prefill.failed(attempt, str(why), isinstance(why, NoReply) and why.kind == "closed")
                    continue
                self.prefill.ended(attempt)
                is_done = reply.status == 200
                self.metrics.prefills.labels(chosen.url, "done" if is_done else "failed").inc()
                if is_done:
                    params = _params(reply.content)
                    return {"kv_transfer_params": params} if params else {}
                if reply.status < 500:  # so will the other server, which says it to the client
                    return {}
        return {}

    def _release(self, fields: Fields) -> None:
        """Let the server that computed a prompt forget it. One that is not told forgets it by itself."""
        if not fields:
            return

        async def ask(url: str) -> None:
            with suppress(NoReply):
                await self._client.ask("DELETE", url, RELEASE_S)

        task = asyncio.create_task(ask(fields["kv_transfer_params"]["remote"]["url"]))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    # -- What becomes of an attempt ---------------------------------------------------------------------------------

    def _search(self, request: RoutedRequest) -> _Search:
        return _Search(request, self._clock() + PATIENCE_S)

    async def _next(self, search: _Search) -> RoutedServer | None:
        """Return the next server for a request; None where none takes it, or there is none in time."""
        while True:
            if search.num_failures >= MOST_FAILURES:
                return None
            if (chosen := self.servers.choose(search.request, search.tried)) is not None:
                return chosen
            left_s = search.until - self._clock()
            if search.last is not None or left_s <= 0:
                return None
            if self.servers.serving:  # all of them have failed at it: each may have been chance
                await asyncio.sleep(min(AGAIN_S, left_s))
            else:
                with suppress(TimeoutError):
                    await self.servers.wait_for_any(left_s)
            search.tried.clear()

    def _is_taken(self, search: _Search, attempt: Attempt, reply: HttpReply) -> bool:
        """Note a whole reply. False where another server is to be asked."""
        if reply.status == 200 and ABORTED not in reply.content:
            self.servers.ended(attempt, num_tokens_of(reply.content))
            self._count(attempt, "done")
            return True
        if reply.status == 200 or reply.status >= 500 or reply.status == 429:
            search.last = reply
            search.num_failures += reply.status not in (200, 429, 503)
            self._count(attempt, "failed")
            return False
        self._count(attempt, "refused")
        return True

    def _failed(self, attempt: Attempt, why: NoReply | CutOff | StreamFailed) -> None:
        self._count(attempt, "failed")
        if isinstance(why, NoReply) and why.kind != "unasked":
            self.servers.failed(attempt, str(why), is_closed=why.kind == "closed")

    def _turn_away(self, search: _Search, chosen: RoutedServer) -> None:
        search.tried.add(chosen.url)
        self.metrics.carried.labels(chosen.url).inc()

    def _without(self, search: _Search) -> Response:
        if search.last is not None:
            return _response(search.last)
        self.metrics.unserved.inc()
        raise NoServer(self._why_none())

    def _why_none(self) -> str:
        shown = [f"{each.url} is {each.status}: {each.reason}" for each in self.servers.all.values()][:4]
        return f"no server takes this request now; try again later ({'; '.join(shown) or 'there is none'})"

    def _count(self, attempt: Attempt, outcome: str) -> None:
        self.metrics.attempts.labels(attempt.url, outcome).inc()


def data_event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _rewritten(partial: PartialStream, data: bytes) -> bytes:
    """Raises StreamFailed."""
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise StreamFailed("a server sent an event that is no JSON object")
    return data_event(json.dumps(partial.take(cast("Fields", event))).encode())


def _params(content: bytes) -> Fields | None:
    try:
        params = json.loads(content)["kv_transfer_params"]
        return params if isinstance(params["remote"]["url"], str) else None
    except (ValueError, KeyError, TypeError):
        return None


def _headers(server: RoutedServer) -> Mapping[str, str]:
    return {"Content-Type": "application/json"} | bearer(server.key)


def _response(reply: HttpReply) -> Response:
    again = {"Retry-After": "1"} if reply.status in (429, 503) else None
    return Response(reply.content, reply.status, again, media_type="application/json")
