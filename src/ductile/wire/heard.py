"""Tasks that are not awaited, and whose failure must not stay unheard."""

import asyncio
from collections.abc import Callable
from typing import Any


def heard(task: "asyncio.Task[Any]", sentence: str, on_error: Callable[[str, Exception], None]) -> None:
    """Report the failure of a task that is done to `on_error(sentence, error)` and to asyncio's log."""
    if task.cancelled():
        return
    error = task.exception()
    if isinstance(error, Exception):
        on_error(sentence, error)
        task.get_loop().call_exception_handler({"message": sentence, "exception": error})
