"""A rank's end of one weight update: fills bucket after bucket from its own parameters, and sends each to all receivers.

sender = WeightSender(update, offer, fill, tell)
offer = sender.start()          goes to the servers: it says where the sender is found
...                             a thread sends; `tell(report)` when it is through, once
sender.finish(timeout_s)        when the update has been committed or aborted
"""

from collections.abc import Callable

from torch import Tensor

from ductile.messages.updates import Bucket, Offer, SendReport, WeightUpdate

Fill = Callable[[Bucket, Tensor], int]
"""Copies a bucket's boxes into the buffer (uint8, of the bucket's bytes), and returns their part of the digest."""


class WeightSender:
    def __init__(self, update: WeightUpdate, offer: Offer, fill: Fill, tell: Callable[[SendReport], None]) -> None:
        """tell: called by the sender's thread with the report, once, also when everything failed."""

    def start(self) -> Offer:
        """Begin. Returns the offer with `location`: where receivers find this sender."""
        raise NotImplementedError

    def leave_out(self, instance: str, reason: str) -> None:
        """Do not wait for a receiver that will not come, such as one that refused to prepare. From any thread."""

    def abort(self) -> None:
        """End soon: the receivers that are not through fail. From any thread; `finish` waits for it."""

    def finish(self, timeout_s: float) -> None:
        """Wait until the thread has ended and free what the update still has. Raises `TimeoutError` after so long."""
