"""A weight update as the orchestrator has the trainer's ranks send it: commands, replies and the event of their end.

BeginUpdate → UpdateBegun ... UpdateSent (of each rank, when it is through) → FinishUpdate
"""

from ductile.messages.message import Message
from ductile.messages.updates import Offer, SendReport, WeightUpdate


class BeginUpdate(Message):
    """Begin to send the weights, as they are, to the update's receivers, beside training. Reply: `UpdateBegun` at
    once; an `UpdateSent` event says when this rank is through. What would change or move the weights waits for that, at
    most as long as the update may take. The same update again is no error, and changes nothing."""

    update: WeightUpdate


class FinishUpdate(Message):
    """Free what the update holds; where it was aborted, stop sending. Reply: `Done`."""

    update_id: str
    aborted: bool

    @property
    def is_beside(self) -> bool:
        return True


class LeaveOut(Message):
    """Do not wait for a receiver that is out of the update which is under way. Reply: `Done`."""

    update_id: str
    instance: str
    reason: str

    @property
    def is_beside(self) -> bool:
        return True


class UpdateBegun(Message):
    offer: Offer
    """Boxes that this rank sends, its own."""


class UpdateSent(Message):
    """This rank is through with an update, also where it failed."""

    report: SendReport
