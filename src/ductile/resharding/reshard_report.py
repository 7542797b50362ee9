"""What a `reshard` did, and how long each phase of it took."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ductile.core.transfer.plan import Plan
from ductile.observe import timed


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

    def phase(self, name: str) -> AbstractContextManager[None]:
        self.now = name
        return timed(self.seconds, name)
