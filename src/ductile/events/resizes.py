"""Events of the trainer's resizes."""

from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.observe import RunEvent


class _ResizeEnded(RunEvent, frozen=True):
    epoch: int
    """Membership epoch in which the trainer goes on."""
    before: tuple[int, ...]
    """Slots of the trainer before, in rank order."""
    after: tuple[int, ...]
    """Slots that were asked for, in rank order."""
    step: int = 0
    """Training steps that were done before."""
    before_dims: ParallelDims | None = None
    """Sizes of the axes before; None in runs of format 1, which had only replicas."""
    after_dims: ParallelDims | None = None
    """Sizes of the axes that were asked for."""
    pause_s: float | None = None
    """Seconds that the trainer stood still. This and what follows is None of a resize that failed in an unexpected
    way."""
    took_s: float | None = None
    """Seconds from the request to the end of the resize, the start of slots included."""
    seconds: dict[str, float] | None = None
    """Seconds that the orchestrator waited, by step of the transaction."""
    slot_seconds: dict[str, float] | None = None
    """Seconds of the slots' work, by phase: the longest of all slots."""
    beside: tuple[str, ...] | None = None
    """Phases of `slot_seconds` in which the trainer still trained."""
    num_bytes: int | None = None
    """Bytes that all slots received together."""
    carrier: str | None = None
    """What moved the bytes, and why; "" when none were moved."""
    traceback: str | None = None
    """Traceback of a resize that failed in an unexpected way."""


class TrainerResized(_ResizeEnded, tag="resized", frozen=True):
    """The trainer has another layout."""


class TrainerWentBack(RunEvent, tag="went_back", frozen=True):
    """The trainer has lost slots, and goes on from the last checkpoint on those that are left. What was trained since
    is trained anew: metrics of later steps are dropped, as a resume drops them."""

    step: int
    """Step of the checkpoint; 0 where there is none, and the run begins anew."""
    lost: tuple[int, ...]
    """Slots of the trainer that are lost. They get no role any more."""
    before: tuple[int, ...]
    """Slots of the trainer before, in rank order."""
    after: tuple[int, ...]
    """Slots of the trainer from now on, in rank order."""
    after_dims: ParallelDims
    """Sizes of the axes from now on."""
    num_in_row: int = 1
    """How often it has gone back to this checkpoint."""
    last_kept: int | None = None
    """Last step whose metrics stay as they are written; None where none does."""


class ResizeRolledBack(_ResizeEnded, tag="resize_rolled_back", frozen=True):
    """A resize is aborted, and the trainer goes on as before."""
