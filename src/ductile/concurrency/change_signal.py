"""Something has changed: every task that waits for a condition looks again. Unlike `asyncio.Condition`, whose
`notify_all` needs its lock, it is told from callbacks, which cannot wait."""

import asyncio
from collections.abc import Callable


class ChangeSignal:
    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify_all(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Returns after the next `notify_all`."""
        await self._next.wait()

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Returns once `condition()` is true, at once if it is already. Raises TimeoutError."""
        if not condition():
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self.wait()
