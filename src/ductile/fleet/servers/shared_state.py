"""The one place where a fleet's state is: changed under a lock, read without one, told of in order. It is made before
all that reads or changes it."""

import threading
import time
from collections import deque
from collections.abc import Callable

from ductile.concurrency.listeners import Listeners
from ductile.core.instances.fleet_state import FleetState
from ductile.core.instances.health import ServerHealth, TransitionRefused
from ductile.core.instances.instances import InstanceId
from ductile.roles import Late

StateChange = Callable[[FleetState], FleetState]


class SharedFleetState:
    """The state is a value, so any thread may read `now` at any time. `on_change(before, after)` hears every change, in
    the order in which they were made, from the thread that made one of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds that never go back; all times in the state are its."""
        self.on_change = Listeners[[FleetState, FleetState]]()
        self.on_fenced = Listeners[[str]]()
        """Told once, with a sentence, when the fleet is another one's."""
        self.clock = clock
        self.fenced = ""
        """Reason for which the fleet is another one's, a sentence; "" while it is ours."""
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

    def apply(self, server: InstanceId, transition: Callable[[ServerHealth], ServerHealth]) -> bool:
        """Change what is known of one server. Returns False where the transition is refused, such as of one that is
        gone."""
        try:
            self.change(lambda state: state.changed(transition(state.of(server))))
        except TransitionRefused:
            return False
        return True

    def next_epoch(self, seen: int = 0) -> int:
        """Return an epoch that is newer than any before: for one attempt at an update. seen: the newest one that the
        servers of the attempt have seen. Raises Late when that is newer than ours, for then others rule: epochs of
        others are adopted only as a server joins (`FleetState.above`)."""
        if seen > self.now.epoch:
            self.fence(f"a server of this one, which has seen its epoch {seen}")
        if self.fenced:
            raise Late(self.fenced)
        return self.change(lambda state: state.above(state.epoch)).epoch

    def fence(self, taken: str) -> None:
        """Make no more decisions: another run has `taken`, such as "the server http://10.0.0.7:8000"."""
        why = f"another run has taken {taken}: end that one, or give this one servers of its own, before it goes on"
        is_news, self.fenced = not self.fenced, self.fenced or why
        if is_news:
            self.on_fenced(why)

    def _tell(self) -> None:
        while self._untold and self._telling.acquire(blocking=False):
            try:
                while self._untold:
                    self.on_change(*self._untold.popleft())
            finally:
                self._telling.release()
