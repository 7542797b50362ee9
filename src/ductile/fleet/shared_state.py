"""The one place where a fleet's state is: changed under a lock, read without one, told of in order."""

import threading
from collections import deque
from collections.abc import Callable

from ductile.concurrency.listeners import Listeners
from ductile.core.instances.fleet_state import FleetState

StateChange = Callable[[FleetState], FleetState]


class SharedFleetState:
    """The state is a value, so any thread may read `now` at any time. `on_change(before, after)` hears every change, in
    the order in which they were made, from the thread that made one of them."""

    def __init__(self) -> None:
        self.on_change = Listeners[[FleetState, FleetState]]()
        self._now = FleetState()
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._untold: deque[tuple[FleetState, FleetState]] = deque()

    @property
    def now(self) -> FleetState:
        return self._now

    def change(self, change: StateChange) -> FleetState:
        """Return the state after the change, which is made of the newest one. What `change` raises leaves it as it
        was."""
        with self._lock:
            before = self._now
            self._now = after = change(before)
            if after != before:
                self._untold.append((before, after))
        self._tell()
        return after

    def _tell(self) -> None:
        while self._untold and self._telling.acquire(blocking=False):
            try:
                while self._untold:
                    self.on_change(*self._untold.popleft())
            finally:
                self._telling.release()
