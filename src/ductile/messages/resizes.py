"""Messages of a resize: what slots are told, and what they reply (docs/resize.md).

    Prepare  ->  Freeze  ->  TransferState  ->  Commit  ->  Finalize      or, after any but the last, Rollback

Each goes to all slots of both layouts (`Prepare` and `Rollback` to the old one's first), and the next one only when
all have replied to the one before; `Freeze` only when all have said `PreparationEnded`, or it would wait for them.
Until `Finalize` every slot still has what it had, so that a change can be taken back; with
`trainer.resize.memory = "streaming"` until bytes move.
"""

from typing import Literal

from ductile.core.layout.geometry.parallel_layout import ResizeOrder
from ductile.messages.message import Message
from ductile.records import TrainProgress


class Prepare(Message):
    """Get ready for a change while training goes on: groups, skeleton, buffers, plan. Reply: `Done` at once, also in
    the middle of a micro-step: the slot prepares in the background, and a `PreparationEnded` event says when it has, or
    that it cannot."""

    order: ResizeOrder

    @property
    def is_beside(self) -> bool:
        return True


class Freeze(Message):
    """Nothing runs between this and `Commit` or `Rollback`. Reply: `Frozen`."""

    epoch: int
    with_gradient: bool


class TransferState(Message):
    """Carry the plan out. Reply: `StateTransferred`, which is this slot's vote for the change; `Failed` is one
    against it."""

    epoch: int
    progress: TrainProgress
    """Progress of the trainer as a whole: sums over all slots."""


class Commit(Message):
    """The new state is the state. Reply: `Done`."""

    epoch: int


class Rollback(Message):
    """The old state stays the state, whatever has been done. Reply: `Done`; a joining slot then has no state."""

    epoch: int


class Finalize(Message):
    """Free what only `Rollback` would need. Reply: `Done`."""

    epoch: int


class Frozen(Message):
    plan_key: bytes
    """Key of the plan that the slot made: all slots must have made the same plan before the first byte moves."""
    progress: TrainProgress | None = None
    """Progress of this rank; None from a joining slot."""


SlotPhase = Literal["carrier", "plan", "groups", "build", "load", "bind", "transfer", "verify", "rebuild"]
"""A phase of a slot's work for a resize."""


class StateTransferred(Message):
    sent: dict[int, int]
    """64-bit fingerprint of all that went to each peer, by slot. It must be what the peer says in `received`."""
    received: dict[int, int]
    num_bytes: int
    """Bytes that this slot received."""
    seconds: dict[SlotPhase, float]
    carrier: str
    """Carrier that moved the bytes, and why it was chosen: a sentence."""
    beside: tuple[SlotPhase, ...] = ()
    """The phases that this slot went through while it trained. All others were in the pause."""
