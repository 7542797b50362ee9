"""What a `reshard` did, and how long each phase of it took."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ductile.core.transfer.plan import Plan


@dataclass(frozen=True)
class Report:
    """What a `reshard` did. `print` shows the plan as a table."""

    plan: Plan
    carrier: str
    """The carrier's name, and why it was chosen."""
    received_bytes: int
    """Bytes that this rank received from others."""
    seconds: Mapping[str, float]
    """Seconds on this rank by phase: describe, carrier, plan, agree, transfer."""
    left_out: tuple[str, ...]
    """Values of the target that are not tensors, and were not moved."""

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {spent * 1e3:.1f} ms" for name, spent in self.seconds.items())
        left_out = f"\nnot moved, since they are not tensors: {', '.join(self.left_out)}" if self.left_out else ""
        return f"{self.plan}\n  {self.carrier}\n  {phases}{left_out}"


class Clock:
    """Measures the seconds that each phase takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.now = ""
        """The last phase that began."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.now = name
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
