"""What every part knows: where it runs, and how it says that it does not."""

from dataclasses import dataclass
from typing import Any, Literal

PART_MODULES = {
    "device": "device",
    "train_0.6b": "train:0.6B",
    "train_4b": "train:4B",
    "generate": "generate",
    "reshard": "reshard",
    "resize": "resize",
    "roles": "roles",
    "publish": "publish",
    "tests": "tests",
}
"""Which module has a part's `run`; behind the colon a further argument."""


@dataclass(frozen=True, slots=True)
class Setting:
    device: Literal["cuda", "cpu"]
    small: bool
    """Tiny models: whether it works, and not how fast."""


class Skipped(Exception):
    """A part that cannot run here. The text says why."""


class Failed(Exception):
    """A part that has figures, and not those that it should have. The text says what is wrong."""

    def __init__(self, reason: str, figures: dict[str, Any]) -> None:
        super().__init__(reason)
        self.figures = figures
