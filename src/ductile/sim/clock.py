"""An asyncio event loop whose seconds cost nothing: they pass only while all tasks wait."""

import asyncio
import gc
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

SELDOM = (200_000, 10, 10)
"""Collector thresholds. Little of what a simulation makes is garbage in cycles, and looking for it again and again took
a fifth of the time of a big one."""


class Deadlock(RuntimeError):
    """All tasks wait, and no timer will wake any."""


class _NoFiles(selectors.BaseSelector):
    """Nothing is ever readable. What the loop would have slept, `slept_s` remembers."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}
        self.slept_s = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fileobj] = selectors.SelectorKey(fileobj, fd, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("all tasks wait, and no timer will wake any")
        self.slept_s += timeout
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._files = _NoFiles()
        super().__init__(self._files)
        # Timers that are this close are due: adding up floats must not leave one forever a little ahead.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._files.slept_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Threads know no virtual time: their work is done at once."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time. Raises Deadlock where the real thing would hang."""
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(work)
    finally:
        gc.set_threshold(*before)


def now_s() -> float:
    return asyncio.get_running_loop().time()
