"""Slots join and requests migrate side by side; a version goes live alone. asyncio has no lock of this kind, and
other libraries' locks wait without a deadline."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.deadline import said
from ductile.roles import Late


class ReadWriteLock:
    """An exclusive holder goes before shared ones that come later. Every wait ends after `timeout_s`, as `Late`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._holders: list[str] = []
        """What is done at the moment; a caller that waits too long is told of it."""
        self._exclusive = False
        self._num_waiting_exclusive = 0
        self._changed = ChangeSignal()

    @asynccontextmanager
    async def shared(self, what: str) -> AsyncGenerator[None]:
        """what: "slot 3 joins"."""
        await self._until(lambda: not self._exclusive and not self._num_waiting_exclusive, what)
        async with self._holding(what):
            yield

    @asynccontextmanager
    async def exclusive(self, what: str) -> AsyncGenerator[None]:
        self._num_waiting_exclusive += 1
        try:
            await self._until(lambda: not self._holders, what)
        finally:
            self._num_waiting_exclusive -= 1
            self._changed.notify_all()
        async with self._holding(what, exclusive=True):
            yield

    @asynccontextmanager
    async def _holding(self, what: str, exclusive: bool = False) -> AsyncGenerator[None]:
        self._holders.append(what)
        self._exclusive = exclusive
        try:
            yield
        finally:
            self._holders.remove(what)
            self._exclusive = False
            self._changed.notify_all()

    async def _until(self, may: Callable[[], bool], what: str) -> None:
        try:
            await self._changed.wait_for(may, self._timeout_s)
        except TimeoutError:
            others = "; ".join(self._holders) or "others came first"
            why = f"it could not begin within {said(self._timeout_s)}, because of this: {others}"
            raise Late(f"{what}: {why}") from None
