"""The sender's end of carriers whose receivers connect to it: what is said is the same, whatever way the bytes take."""

from torch import Tensor

from ductile.messages.updates import Bucket
from ductile.weights.carriers.channel import Coming
from ductile.weights.carriers.control import Audience


class ConnectedSender:
    """A `ductile.weights.carriers.carrier.BucketSender` for an audience."""

    def __init__(self, audience: Audience) -> None:
        self._audience = audience

    @property
    def live(self) -> bool:
        return bool(self._audience.channels)

    def send(self, bucket: Bucket, slot: int, content: Tensor, checksum: str) -> None:
        self._audience.tell(Coming(bucket.index, slot, checksum))

    def wait(self, bucket: Bucket) -> None:
        while self._audience.lacking(bucket.index):
            self._audience.listen()
            self._audience.drop_late(bucket.index)

    def leave_out(self, instance: str) -> None:
        self._audience.shut(instance)

    def close(self, reason: str = "") -> dict[str, str]:
        return self._audience.close(reason)
