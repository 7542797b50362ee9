"""Parts that all carriers of buckets have in common."""

from collections.abc import Callable
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from ductile.error_text import error_text
from ductile.messages.updates import Bucket, Offer

Sink = Callable[[Offer, Bucket, Tensor], None]
"""Loads a bucket into the version that is staged. The tensor is the bucket's bytes (uint8), often a view of memory that
the sender fills anew: the sink has copied them when it returns, and returning is the acknowledgement."""


class UpdateFailed(Exception):
    """A receiver does not get the version. The text is a sentence."""


def sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, UpdateFailed) else error_text(error)


def bytes_of(content: bytearray) -> Tensor:
    """Return the bytes as a tensor (uint8) in the same memory."""
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


class BucketSender(Protocol):
    """A sender's end of one carrier, for all receivers that chose it. `send` and `wait` are called by a thread each,
    in the order of the buckets; a receiver that fails is dropped and does not hold up the others."""

    @property
    def live(self) -> bool:
        """True while anybody is left to send to."""
        ...

    def send(self, bucket: Bucket, slot: int, content: Tensor, checksum: str) -> None:
        """Begin to transfer a bucket, and return at once. `content` is its bytes, in a slot of the ring."""
        ...

    def wait(self, bucket: Bucket) -> None:
        """Return once each receiver has loaded the bucket, or has failed, and `content` is read no more."""
        ...

    def leave_out(self, instance: str) -> None:
        """Have `wait` return soon: this receiver fails. From any thread."""
        ...

    def close(self, reason: str = "") -> dict[str, str]:
        """Let go of what is under way, and return the receivers that failed, with a sentence. With a reason, all that
        are left fail of it."""
        ...


def checksum_of(content: Tensor) -> str:
    """Return the checksum of a bucket's bytes (xxh3), which lie on the CPU."""
    return xxhash.xxh3_64_hexdigest(content.numpy().data)


def refuse_damaged(sender: str, bucket: Bucket, content: Tensor, expected: str) -> None:
    """Raise `UpdateFailed` where a bucket's bytes are not those that were sent. expected: their `checksum_of`; "":
    none was sent."""
    if content.numel() != bucket.num_bytes:
        raise UpdateFailed(
            f"bucket {bucket.index} of {sender} came with {content.numel()} bytes, and has {bucket.num_bytes}"
        )
    if expected and (found := checksum_of(content)) != expected:
        raise UpdateFailed(
            f"bucket {bucket.index} of {sender} is damaged: its checksum is {found}, and {expected[:16]} was sent"
        )
