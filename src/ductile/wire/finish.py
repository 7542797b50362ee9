"""Work that is not left half done when its caller is cancelled."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


async def finish(work: Awaitable[T]) -> T:
    """The result of `work`, which goes on to its end when the caller is cancelled.

    What `work` raises after that is dropped: the caller has ended for a reason of its own, and asyncio is not to print
    a traceback about it.
    """
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        working.add_done_callback(_hear)
        raise


def _hear(working: "asyncio.Future[Any]") -> None:
    if not working.cancelled():
        working.exception()
