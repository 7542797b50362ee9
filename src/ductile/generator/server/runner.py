"""An engine in a thread of its own, for asyncio callers.

The thread waits for work and steps; the loop never waits for a step. What is asked travels as calls in a queue, which
the thread makes between two steps; what was generated travels back once a step, in one wake-up of the loop for all.

A caller that waits here waits for the thread. When it fails or is silent for longer than `STALLED_AFTER_S`, every
waiter gets `EngineFailed`. A request that the engine cannot take, or cannot go on with, gets `RequestFailed`, and it
alone.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar

from ductile.columns import TokenIds
from ductile.error_text import error_text
from ductile.generator.engine.engine import Engine
from ductile.generator.engine.kv_transfer import RequestKV
from ductile.generator.engine.limits import RequestRefused
from ductile.generator.engine.logprob_report import LogprobReport
from ductile.messages.updates import Digest
from ductile.records import FinishReason, GenerateRequest, Generation, Sampling

T = TypeVar("T")

STALLED_AFTER_S = 60.0
"""Seconds of one engine step after which the engine counts as stuck."""

REMEMBERED = 1000
"""Versions whose digests are known."""

PROBE = "probe"
"""The id of the request that asks an idle engine for a step."""


class EngineFailed(Exception):
    """The engine cannot serve any more, or did not step in time. The text says what happened."""


class RequestFailed(Exception):
    """The engine failed at this one request; the others go on."""


WeightSpan = tuple[int, Digest, int]
"""Tokens in a row that were sampled from the same weights: their version and digest, and how many tokens they are."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens that one request of a call generated since the last time."""

    index: int
    """Place of the request among those of its call."""
    token_ids: list[int]
    logprobs: list[float]
    spans: list[WeightSpan]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class _Listener:
    """Receiver of a request's deltas."""

    index: int
    mailbox: "asyncio.Queue[Any]"
    each_step: bool
    num_sent: int = 0
    takes_cache: bool = False
    """True where the request leaves after its first token, and its keys and values are what is wanted."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of `generate` or `prefill` on its way to the engine."""

    requests: Sequence[GenerateRequest]
    mailbox: "asyncio.Queue[Any]"
    each_step: bool = False
    reports: Sequence[LogprobReport | None] = ()
    caches: Sequence[RequestKV | None] = ()
    takes_cache: bool = False


class EngineRunner:
    """Made and used in one asyncio loop. `start` before the first call, `stop` after the last."""

    def __init__(
        self, engine: Engine, on_failure: Callable[[EngineFailed], None] = lambda failure: None, digest: Digest = ""
    ) -> None:
        """`on_failure` is called in the loop when the thread has failed: nothing can be generated any more.
        digest: of the engine's weights."""
        self.engine, self._on_failure = engine, on_failure
        self._digests: dict[int, Digest] = {engine.version: digest}
        """Digests of the versions that a token in flight may be of."""
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._listeners: dict[str, _Listener] = {}
        """Listeners by request id. Only the thread touches them, the engine (others may read it) and `_probes`."""
        self._probes: list[asyncio.Queue[Delta | Exception]] = []
        self._paused = self._draining = False
        """True, first, when no step is made; second, when none will be once all that is in the engine has ended."""
        self._held: list[_Call] = []
        """Calls of `generate` that wait for the draining to end."""
        self._drained: list[asyncio.Queue[Exception | None]] = []
        self._stopping = False
        self._failure: EngineFailed | None = None
        self._last_beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self, deadline_s: float = 10.0) -> None:
        """End what is in flight with what it has, and the thread."""
        self._stopping = True
        self._calls.put(lambda: None)
        await asyncio.to_thread(self._thread.join, deadline_s)

    async def generate(
        self,
        requests: Sequence[GenerateRequest],
        each_step: bool,
        reports: Sequence[LogprobReport | None] | None = None,
        caches: Sequence[RequestKV | None] = (),
    ) -> AsyncGenerator[Delta]:
        """Yields until all requests ended: their tokens after each step, or all at the end. `reports`, one for each
        request, know at least as much as the deltas that have come. caches: what other engines computed of each one's
        context; one of other weights than those that are live by then is left out.

        A caller that stops iterating aborts what has not ended. Raises `RequestRefused` before the first delta,
        `RequestFailed` and `EngineFailed` at any time.
        """
        mailbox: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        unfinished = {index: request.id for index, request in enumerate(requests)}
        none = [None] * len(requests)
        call = _Call(requests, mailbox, each_step, reports or none, caches or none)
        self._calls.put(lambda: self._add(call))
        try:
            while unfinished:
                item = await self._next(mailbox)
                if isinstance(item, Exception):
                    raise item
                if item.finish_reason:
                    del unfinished[item.index]
                yield item
        finally:
            if unfinished:
                self._calls.put(lambda: self._forget(list(unfinished.values())))

    async def prefill(self, request: GenerateRequest) -> RequestKV | None:
        """Compute a request's prompt, and return its keys and values; None where it ended before they could be taken.
        The request must have room for two tokens. Raises as `generate` does; a caller that is cancelled aborts it."""
        mailbox: asyncio.Queue[Delta | Exception | tuple[RequestKV | None]] = asyncio.Queue()
        call = _Call([request], mailbox, reports=[None], caches=[None], takes_cache=True)
        self._calls.put(lambda: self._add(call))
        has_ended = False
        try:
            item = await self._next(mailbox)
            has_ended = True
        finally:
            if not has_ended:
                self._calls.put(lambda: self._forget([request.id]))
        if isinstance(item, Exception):
            raise item
        return item[0] if isinstance(item, tuple) else None

    async def between_steps(self, call: Callable[[], T], fatal: bool = False) -> T:
        """Make a call of the engine in its thread. fatal: where it raises, the engine is dead (fail-stop)."""
        mailbox: asyncio.Queue[tuple[T] | Exception] = asyncio.Queue()

        def make() -> None:
            try:
                result: tuple[T] | Exception = (call(),)
            except Exception as error:
                if fatal:
                    raise
                result = error
            self._post([(mailbox, result)])

        self._calls.put(make)
        item = await self._next(mailbox)
        if isinstance(item, Exception):
            raise item
        return item[0]

    async def pause(self, mode: Literal["abort", "keep", "drain"], deadline_s: float) -> None:
        """Make no step after this, until `resume`: requests wait, those that run (keep) and those that come. abort ends
        before what runs, with what it has; drain lets it end, and raises `TimeoutError` when that takes too long."""
        mailbox: asyncio.Queue[Exception | None] = asyncio.Queue()
        self._calls.put(lambda: self._pause(mode, mailbox))
        if isinstance(item := await asyncio.wait_for(self._next(mailbox), deadline_s), Exception):
            raise item

    def end_all(self) -> None:
        """Pause, and let nobody wait for what was in flight: it ends with what it has."""
        self._calls.put(lambda: self._pause("abort", asyncio.Queue()))

    def resume(self) -> None:
        self._calls.put(self._resume)

    def change_over(self, version: int, digest: Digest, swap: Callable[[], None]) -> None:
        """Have `swap` make a version live, in the thread. Where it is not newer than the live one, another run has
        begun: what is in flight ends with what it has, as no token may pass for one of the new run's versions."""
        if version <= self.engine.version:
            self.engine.abort()
            self._step()
        swap()
        self._digests[version] = digest
        while len(self._digests) > REMEMBERED:
            del self._digests[next(iter(self._digests))]

    async def probe(self, deadline_s: float) -> None:
        """Return when the engine finished a step, asking for one if it is idle. Raises `EngineFailed` in time."""
        mailbox: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self._calls.put(lambda: self._probe(mailbox))
        try:
            item = await asyncio.wait_for(self._next(mailbox), deadline_s)
        except TimeoutError:
            raise EngineFailed(f"the engine did not finish a step within {deadline_s:g} s") from None
        if isinstance(item, Exception):
            raise item

    def check_alive(self) -> None:
        """Raise `EngineFailed` when the thread ended or is stuck."""
        if self._failure:
            raise self._failure
        if not self._thread.is_alive():
            raise EngineFailed("the engine was stopped")
        silent_s = time.monotonic() - self._last_beat
        if silent_s > STALLED_AFTER_S:
            raise EngineFailed(f"the engine has been in one step for {silent_s:.0f} s")

    async def _next(self, mailbox: "asyncio.Queue[T]") -> T:
        while True:
            self.check_alive()
            try:
                return await asyncio.wait_for(mailbox.get(), 1.0)
            except TimeoutError:
                continue

    @property
    def digest(self) -> Digest:
        """The digest of the live version, as far as anybody has told it."""
        return self._digests.get(self.engine.version, "")

    # -- What follows runs in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._last_beat = time.monotonic()
                self._make_calls(wait_s=0.0 if self.engine.has_work() and not self._paused else 1.0)
                if self._draining and not self.engine.has_work():
                    self._pause_now()
                if self.engine.has_work() and not self._paused:
                    self._step()
            self.engine.abort()
            self._step()
        except BaseException as error:
            failure = self._failure = EngineFailed(f"the engine failed: {error_text(error)}")
            self._post([(listener.mailbox, failure) for listener in self._listeners.values()])
            self._tell(lambda: self._on_failure(failure))

    def _make_calls(self, wait_s: float) -> None:
        try:
            call = self._calls.get(timeout=wait_s) if wait_s else self._calls.get_nowait()
            while True:
                call()
                call = self._calls.get_nowait()
        except Empty:
            return

    def _step(self) -> None:
        ended = {generation.id: generation for generation in self.engine.step()}
        failed = {id: RequestFailed(error_text(error)) for id, error in self.engine.failed.items()}
        post: list[tuple[asyncio.Queue[Any], Any]] = []
        for id in (*ended, *failed):
            if listener := self._listeners.pop(id, None):
                post.append((listener.mailbox, failed.get(id) or self._ending(ended[id], listener)))
        for id in self.engine.running():  # a request that waits, and there may be thousands, has no news
            listener = self._listeners.get(id)
            if listener and listener.takes_cache:
                if (begun := self.engine.peek(id)) and begun[0]:
                    _, caches = self.engine.migrate_out([id], [id])
                    del self._listeners[id]
                    post.append((listener.mailbox, (caches.get(id),)))
            elif listener and listener.each_step and (new := self.engine.peek(id, listener.num_sent)) and new[0]:
                listener.num_sent += len(new[0])
                tokens, logprobs, versions = new
                post.append((listener.mailbox, Delta(listener.index, tokens, logprobs, self._spans(versions), None)))
        post += [(mailbox, failed.get(PROBE) or Delta(0, [], [], [], None)) for mailbox in self._probes]
        self._probes.clear()
        self._post(post)

    def _ending(self, generation: Generation, listener: _Listener) -> Delta:
        sent = listener.num_sent
        tokens, logprobs = generation.token_ids[sent:], generation.logprobs[sent:]
        spans = self._spans(generation.versions[sent:])
        return Delta(listener.index, list(tokens), list(logprobs), spans, generation.finish_reason)

    def _spans(self, versions: Sequence[int]) -> list[WeightSpan]:
        return [(version, self._digests.get(version, ""), len(list(run))) for version, run in groupby(versions)]

    def _post(self, items: Sequence[tuple[asyncio.Queue[Any], Any]]) -> None:
        def put_all() -> None:
            for mailbox, item in items:
                mailbox.put_nowait(item)

        if items:
            self._tell(put_all)

    def _tell(self, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # a loop that is closed waits for nothing
            self._loop.call_soon_threadsafe(callback)

    def _add(self, call: _Call) -> None:
        if self._draining:
            self._held.append(call)
            return
        try:
            self.engine.check(*call.requests)
            for index, (request, report, cache) in enumerate(
                zip(call.requests, call.reports, call.caches, strict=True)
            ):
                is_live = cache is not None and cache.version == self.engine.version
                self.engine.add(request, cache if is_live else None, report)
                self._listeners[request.id] = _Listener(
                    index, call.mailbox, call.each_step, len(request.generated), call.takes_cache
                )
        except RequestRefused as refusal:
            self._post([(call.mailbox, refusal)])
        except Exception as error:  # the caller then aborts those that were added
            self._post([(call.mailbox, RequestFailed(error_text(error)))])

    def _pause(self, mode: str, mailbox: "asyncio.Queue[Exception | None]") -> None:
        self._drained.append(mailbox)
        if mode == "abort":
            self.engine.abort()
            self._step()
        if mode == "drain":
            self._paused, self._draining = False, True
        else:
            self._pause_now()

    def _pause_now(self) -> None:
        self._paused, self._draining = True, False
        self._post([(mailbox, None) for mailbox in self._drained])
        self._post([(mailbox, Delta(0, [], [], [], None)) for mailbox in self._probes])
        self._drained.clear()
        self._probes.clear()
        self._take_held()

    def _resume(self) -> None:
        self._paused = self._draining = False
        self._take_held()

    def _take_held(self) -> None:
        held, self._held = self._held, []
        for one in held:
            self._add(one)

    def _forget(self, ids: Sequence[str]) -> None:
        self._held = [one for one in self._held if one.requests[0].id not in ids]
        for id in ids:
            self._listeners.pop(id, None)
        self.engine.abort(ids)

    def _probe(self, mailbox: "asyncio.Queue[Delta | Exception]") -> None:
        if self._paused:  # it lives, and is not to step
            self._post([(mailbox, Delta(0, [], [], [], None))])
            return
        self._probes.append(mailbox)
        if not self.engine.has_work():
            one_token = Sampling(temperature=0.0, max_tokens=1)
            self.engine.add(GenerateRequest(PROBE, TokenIds((0,)), one_token))
