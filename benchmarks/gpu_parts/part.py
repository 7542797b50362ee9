"""What every part knows: where it runs, and how it says that it does not."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Setting:
    device: Literal["cuda", "cpu"]
    small: bool
    """Tiny models: whether it works, and not how fast."""
    deadline_s: float = 120.0
    """The part's process is killed then, with all that it has not said."""


class Skipped(Exception):
    """A part that cannot run here. The text says why."""


class Failed(Exception):
    """A part that has figures, and not those that it should have. The text says what is wrong."""

    def __init__(self, reason: str, figures: dict[str, Any]) -> None:
        super().__init__(reason)
        self.figures = figures
