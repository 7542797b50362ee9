"""What is around a training run, from its start or resume to its end."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ductile.observe import Recorder


@dataclass(frozen=True, slots=True)
class RunContext:
    record: Recorder
    stop: asyncio.Event
    """Set by the first Ctrl-C: the running step is finished and saved."""
    slots: Callable[[], Mapping[str, Sequence[int]]] = dict
    """Returns the slots by role; called at the end, for the summary."""
    counts: Callable[[], Mapping[str, float]] = dict
    """Returns further metrics of each step."""
    death: Callable[[], Coroutine[Any, Any, str]] | None = None
    """Waits until a process that the run needs is gone, and returns a sentence about it; None: none is watched."""
    save_soon: asyncio.Event = field(default_factory=asyncio.Event)
    """Set each time that the last whole step is to be saved at once, and training goes on."""
    began_s: float = field(default_factory=time.perf_counter)
    """`time.perf_counter()` of the command's start, for `wall_s`."""

    def death_watch(self) -> Coroutine[Any, Any, str] | None:
        """`death()`, for `ductile.orchestrator.ending.run_until.run_until` to await beside work that needs all
        processes."""
        return self.death() if self.death else None

    def wall_s(self) -> float:
        return time.perf_counter() - self.began_s
