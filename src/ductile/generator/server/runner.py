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
from queue import Empty, SimpleQueue
from typing import Any

from ductile.columns import TokenIds
from ductile.error_text import error_text
from ductile.generator.engine.engine import Engine
from ductile.generator.engine.limits import RequestRefused
from ductile.generator.engine.logprob_report import LogprobReport
from ductile.records import FinishReason, GenerateRequest, Generation, Sampling

STALLED_AFTER_S = 60.0
"""Seconds of one engine step after which the engine counts as stuck."""

PROBE = "probe"
"""The id of the request that asks an idle engine for a step."""


class EngineFailed(Exception):
    """The engine cannot serve any more, or did not step in time. The text says what happened."""


class RequestFailed(Exception):
    """The engine failed at this one request; the others go on."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one request of a call generated since the last time."""

    index: int
    """Place of the request among those of its call."""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class _Listener:
    """Receiver of a request's deltas."""

    index: int
    mailbox: "asyncio.Queue[Delta | Exception]"
    each_step: bool
    num_sent: int = 0


class EngineRunner:
    """Made and used in one asyncio loop. `start` before the first call, `stop` after the last."""

    def __init__(self, engine: Engine, on_failure: Callable[[EngineFailed], None] = lambda failure: None) -> None:
        """`on_failure` is called in the loop when the thread has failed: nothing can be generated any more."""
        self.engine, self._on_failure = engine, on_failure
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._listeners: dict[str, _Listener] = {}
        """Listeners by request id. Only the thread touches them, the engine (others may read it) and `_probes`."""
        self._probes: list[asyncio.Queue[Delta | Exception]] = []
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
    ) -> AsyncGenerator[Delta]:
        """Yields until all requests ended: their tokens after each step, or all at the end. `reports`, one for each
        request, know at least as much as the deltas that have come.

        A caller that stops iterating aborts what has not ended. Raises `RequestRefused` before the first delta,
        `RequestFailed` and `EngineFailed` at any time.
        """
        mailbox: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        unfinished = {index: request.id for index, request in enumerate(requests)}
        self._calls.put(lambda: self._add(requests, mailbox, each_step, reports or [None] * len(requests)))
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

    async def _next(self, mailbox: "asyncio.Queue[Delta | Exception]") -> Delta | Exception:
        while True:
            self.check_alive()
            try:
                return await asyncio.wait_for(mailbox.get(), 1.0)
            except TimeoutError:
                continue

    # -- What follows runs in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._last_beat = time.monotonic()
                self._make_calls(wait_s=0.0 if self.engine.has_work() else 1.0)
                if self.engine.has_work():
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
        post: list[tuple[asyncio.Queue[Any], Delta | Exception]] = []
        for id in (*ended, *failed):
            if listener := self._listeners.pop(id, None):
                post.append((listener.mailbox, failed.get(id) or _ending(ended[id], listener)))
        for id in self.engine.running():  # a request that waits, and there may be thousands, has no news
            listener = self._listeners.get(id)
            if listener and listener.each_step and (new := self.engine.peek(id, listener.num_sent)) and new[0]:
                listener.num_sent += len(new[0])
                post.append((listener.mailbox, Delta(listener.index, *new, None)))
        post += [(mailbox, failed.get(PROBE) or Delta(0, [], [], None)) for mailbox in self._probes]
        self._probes.clear()
        self._post(post)

    def _post(self, items: Sequence[tuple[asyncio.Queue[Any], Delta | Exception]]) -> None:
        def put_all() -> None:
            for mailbox, item in items:
                mailbox.put_nowait(item)

        if items:
            self._tell(put_all)

    def _tell(self, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # a loop that is closed waits for nothing
            self._loop.call_soon_threadsafe(callback)

    def _add(
        self,
        requests: Sequence[GenerateRequest],
        mailbox: "asyncio.Queue[Delta | Exception]",
        each_step: bool,
        reports: Sequence[LogprobReport | None],
    ) -> None:
        try:
            self.engine.check(*requests)
            for index, (request, report) in enumerate(zip(requests, reports, strict=True)):
                self.engine.add(request, report=report)
                self._listeners[request.id] = _Listener(index, mailbox, each_step)
        except RequestRefused as refusal:
            self._post([(mailbox, refusal)])
        except Exception as error:  # the caller then aborts those that were added
            self._post([(mailbox, RequestFailed(error_text(error)))])

    def _forget(self, ids: Sequence[str]) -> None:
        for id in ids:
            self._listeners.pop(id, None)
        self.engine.abort(ids)

    def _probe(self, mailbox: "asyncio.Queue[Delta | Exception]") -> None:
        self._probes.append(mailbox)
        if not self.engine.has_work():
            one_token = Sampling(temperature=0.0, max_tokens=1)
            self.engine.add(GenerateRequest(PROBE, TokenIds((0,)), one_token))


def _ending(generation: Generation, listener: _Listener) -> Delta:
    tokens, logprobs = generation.token_ids[listener.num_sent :], generation.logprobs[listener.num_sent :]
    return Delta(listener.index, list(tokens), list(logprobs), generation.finish_reason)
