"""Something has changed: every task that waits for a state of affairs looks again."""

import asyncio
from collections.abc import Callable


class News:
    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Returns once it holds, at once if it does already. Raises TimeoutError."""
        if not holds():
            async with asyncio.timeout(timeout_s):
                while not holds():
                    await self._next.wait()
