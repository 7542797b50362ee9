"""Those that want to hear of one kind of event."""

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Listeners(Generic[P]):
    """Called like a function, it calls all that were added, in their order: `buffer.on_change.add(controller.notify)`,
    `self.on_change()`."""

    def __init__(self) -> None:
        self._listeners: list[Callable[P, None]] = []

    def add(self, listener: Callable[P, None]) -> None:
        self._listeners.append(listener)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for listener in tuple(self._listeners):
            listener(*args, **kwargs)
