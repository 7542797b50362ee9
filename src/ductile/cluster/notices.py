"""Notices about slots, from those who hear of them to those who act on them."""

import time
from collections.abc import Callable
from dataclasses import replace

from ductile.core.scheduling.drains import Notice


class Notices:
    """Called with a notice, it tells all that listen. What comes before anybody does, while the run starts, is kept for
    the first who does, with the seconds that are left by then."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._listeners: list[Callable[[Notice], None]] = []
        self._kept: dict[tuple[int, ...], tuple[float, Notice]] = {}
        """The time of the first notice about these slots, and the notice."""

    def add(self, listener: Callable[[Notice], None]) -> None:
        self._listeners.append(listener)
        kept, self._kept = self._kept, {}
        for came_s, notice in kept.values():
            listener(replace(notice, deadline_s=max(0.0, came_s + notice.deadline_s - self._now_s())))

    def __call__(self, notice: Notice) -> None:
        if not self._listeners:
            self._kept.setdefault(notice.slots, (self._now_s(), notice))
        for listener in tuple(self._listeners):
            listener(notice)
