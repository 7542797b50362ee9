"""Doing things at the same time without losing sight of any."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class DaemonThreads(Executor):
    """Runs each call in a thread of its own. Unlike a pool's threads, one that never returns does not keep the process
    from ending."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = Future[T]()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=call, name=f"ductile {getattr(fn, '__name__', '')}", daemon=True).start()
        return future


class OneThread:
    """A daemon thread for blocking calls, one at a time: while one hangs, the next ones wait for it, and leave no
    threads of their own that hang as well."""

    def __init__(self) -> None:
        self._running: asyncio.Future[Any] | None = None

    async def call(self, work: Callable[[], T], timeout_s: float) -> T:
        """Raises TimeoutError, and what `work` raises. After a TimeoutError it may still be done."""
        async with asyncio.timeout(timeout_s):
            if self._running is not None and not self._running.done():
                await asyncio.wait([self._running])
            running = asyncio.get_running_loop().run_in_executor(DaemonThreads(), work)
            running.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._running = running
            return await asyncio.shield(running)


async def gather_all(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """All results, in order. The first failure (or a cancellation) cancels the rest, sees them end, and is raised.

    `asyncio.TaskGroup` would raise it in a group, and callers catch it by its class.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def cancel_on(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; or None as soon as `event` is set, with `work` cancelled and ended."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def undisturbed(work: Awaitable[T]) -> T:
    """The result of `work`, which must not be left half done: a cancellation is raised when it has ended.

    A second cancellation ends it: the caller does not want to wait any more.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        raise


class PipelinedTask:
    """One piece of work at a time, behind the caller's back: `start` returns while it runs.

    Starting the next waits for the one before; leaving the `async with` waits for the last, or cancels it when the
    body failed. `on_error` hears of a failure at once, so that the caller can be woken from another wait.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self.idle = asyncio.Event()
        """Nothing runs."""
        self.idle.set()
        self._on_error = on_error
        self._task: asyncio.Task[Any] | None = None

    async def start(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await self.finish()
        except BaseException:
            work.close()
            raise
        self._task = asyncio.create_task(work)
        self.idle.clear()
        self._task.add_done_callback(self._done)

    async def __aenter__(self) -> "PipelinedTask":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.finish()
        elif self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def finish(self) -> None:
        """Wait for what runs; a failure of it is raised."""
        if self._task is not None:
            task, self._task = self._task, None
            try:
                await task
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise

    def _done(self, task: "asyncio.Task[Any]") -> None:
        if self._task in (task, None):  # the next one may run already
            self.idle.set()
        if not task.cancelled() and (error := task.exception()):
            self._on_error(error)


class Pause:
    """Something may not go on: others can wait for that to begin, and for its end."""

    def __init__(self) -> None:
        self.begun, self.over = asyncio.Event(), asyncio.Event()
        self.over.set()

    def set(self, held: bool) -> None:
        begins, ends = (self.begun, self.over) if held else (self.over, self.begun)
        begins.set()
        ends.clear()
