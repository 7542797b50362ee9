"""Running something no longer than the processes live that it needs, and than the user wants."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from ductile.roles import Failure

T = TypeVar("T")

CAUSE_S = 1.0
"""How long after a failure the news of a death may come that caused it."""


class SlotDied(Failure):
    """A process that the run needs is gone. The text is the sentence of `Cluster.death`."""

    code = "slot_died"


class Stopped(Exception):
    """The user did not want to wait for the end."""


async def first_of(*watches: Coroutine[Any, Any, T]) -> T:
    """Return what the first of them returns, or raise what it raises; the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in watches]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


async def run_until(
    work: Coroutine[Any, Any, T],
    stop: asyncio.Event | None = None,
    death: Coroutine[Any, Any, str] | None = None,
    cancel_s: float = 3.0,
) -> T:
    """The result of `work`; or, as soon as `stop` is set or `death` returns, Stopped or SlotDied. What `death` raises
    is raised.

    `work` is cancelled then and has `cancel_s` to clean up, and so it has when `run_until` itself is cancelled. When it
    fails by itself, a death that becomes known a moment later is the cause, and is raised instead with the failure
    behind it.
    """
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future((stop or asyncio.Event()).wait())
    dying = asyncio.ensure_future(death or asyncio.Event().wait())
    try:
        try:
            await asyncio.wait([working, stopping, dying], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not working.done():
                working.cancel()
                await asyncio.wait([working], timeout=cancel_s)
        failure = None if not working.done() or working.cancelled() else working.exception()
        if failure and death and not dying.done():
            await asyncio.wait([dying], timeout=CAUSE_S)
        if working.done() and not working.cancelled() and not failure:
            return working.result()
        if dying.done():
            raise SlotDied(str(dying.result())) from failure
        if failure:
            raise failure
        raise Stopped
    finally:
        for task in (working, stopping, dying):
            task.cancel()
