"""Many together, or one alone: slots join and requests change hands at the same time, a new version goes live alone."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ductile.roles import Late
from ductile.wire.news import News


class Turns:
    """A caller that wants to be alone goes before later ones. Every wait ends after `timeout_s`, as `Late`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._doing: list[str] = []
        """What is done at the moment; a caller that waits too long is told of it."""
        self._alone = False
        self._num_waiting_alone = 0
        self._news = News()

    @asynccontextmanager
    async def together(self, what: str) -> AsyncIterator[None]:
        """what: "slot 3 joins"."""
        await self._until(lambda: not self._alone and not self._num_waiting_alone, what)
        async with self._turn(what):
            yield

    @asynccontextmanager
    async def alone(self, what: str) -> AsyncIterator[None]:
        self._num_waiting_alone += 1
        try:
            await self._until(lambda: not self._doing, what)
        finally:
            self._num_waiting_alone -= 1
            self._news.tell()
        self._alone = True
        try:
            async with self._turn(what):
                yield
        finally:
            self._alone = False
            self._news.tell()

    @asynccontextmanager
    async def _turn(self, what: str) -> AsyncIterator[None]:
        self._doing.append(what)
        try:
            yield
        finally:
            self._doing.remove(what)
            self._news.tell()

    async def _until(self, may: Callable[[], bool], what: str) -> None:
        try:
            await self._news.until(may, self._timeout_s)
        except TimeoutError:
            others = "; ".join(self._doing) or "others came first"
            raise Late(f"{what}: it could not begin within {self._timeout_s:g} s, because of this: {others}") from None
