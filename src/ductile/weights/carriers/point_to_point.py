"""Buckets by the control connections themselves: behind the message that a bucket comes there are its bytes.

    sender                    receiver
    Coming, bytes   ->        reads them, from the socket to where they are loaded from
                    <-        Loaded

Every receiver has a connection to every sender, so one that dies or hangs is known by its own, and takes nobody with
it. What a socket does not take at once is sent while the next bucket is filled.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ductile.messages.updates import Bucket, Offer
from ductile.weights.carriers.carrier import UpdateFailed
from ductile.weights.carriers.channel import Coming, Loaded, Through
from ductile.weights.carriers.connected import ConnectedSender
from ductile.weights.carriers.source import Source


class PointToPointSender(ConnectedSender):
    def send(self, bucket: Bucket, slot: int, content: Tensor, checksum: str) -> None:
        self._audience.tell(Coming(bucket.index, slot, checksum), content.numpy().data)


def receive(source: Source, offer: Offer, load: Callable[[Bucket, Tensor, str], None]) -> None:
    """Load all buckets of one sender. Raises `UpdateFailed`."""
    buffer = torch.empty(max((bucket.num_bytes for bucket in offer.buckets), default=0), dtype=torch.uint8)
    for bucket in offer.buckets:
        coming = source.next()
        if not isinstance(coming, Coming) or coming.index != bucket.index:
            raise UpdateFailed(f"{offer.sender} sent {coming} where bucket {bucket.index} was due")
        content = buffer[: bucket.num_bytes]
        source.read_into(content.numpy().data)
        load(bucket, content, coming.checksum)
        source.say(Loaded(bucket.index))
    if not isinstance(source.next(), Through):
        raise UpdateFailed(f"{offer.sender} goes on after its last bucket")
