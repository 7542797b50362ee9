"""Work of asyncio that nothing awaits to its end: it is not left half done, and its failure is reported."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_running: set[asyncio.Task[Any]] = set()
"""Tasks of `start`: the event loop itself has only weak references to them."""


def start(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Start a task that goes on to its end, also when nothing waits for it."""
    task = asyncio.create_task(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


async def finish(work: "Coroutine[Any, Any, T] | asyncio.Task[T]") -> T:
    """The result of `work`, which goes on to its end when the caller is cancelled. A task that has begun is one of
    `start`.

    What `work` raises after that is dropped: the caller has ended for a reason of its own, and asyncio is not to print
    a traceback about it.
    """
    working = work if isinstance(work, asyncio.Task) else start(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        working.add_done_callback(_retrieve_exception)
        raise


def start_reported(
    work: Coroutine[Any, Any, T], sentence: str, on_error: Callable[[str, Exception], None]
) -> "asyncio.Task[T]":
    """`start`; a failure of the task is reported to `on_error(sentence, error)` and to asyncio's log."""

    def report(task: "asyncio.Task[T]") -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            on_error(sentence, error)
            task.get_loop().call_exception_handler({"message": sentence, "exception": error})

    task = start(work)
    task.add_done_callback(report)
    return task


def _retrieve_exception(working: "asyncio.Future[Any]") -> None:
    if not working.cancelled():
        working.exception()
