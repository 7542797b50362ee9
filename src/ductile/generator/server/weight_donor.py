"""A server as the source of its own weights, for another one that joins: a lease keeps a version as it is, and whoever
knows the lease's name may ask for its buckets."""

import asyncio
import secrets
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from ductile.generator.server.update_machine import Fenced, Unusable
from ductile.messages.updates import Bucket, LeaseVersion, Offer, VersionLease
from ductile.weights.buckets import OwnedTensor, offer_of
from ductile.weights.live_weights import LiveWeights, VersionTensors

MOST_LEASES = 8


@dataclass(slots=True)
class _Lease:
    held: VersionTensors
    offer: Offer
    pin: ExitStack
    ends: asyncio.TimerHandle


class WeightDonor:
    """Made in the loop that serves; `close` at the end."""

    def __init__(self, live: LiveWeights, can_keep: bool) -> None:
        """can_keep: False where the live tensors are overwritten by the next version."""
        self._live, self._can_keep = live, can_keep
        self._loop = asyncio.get_running_loop()
        self._leases: dict[str, _Lease] = {}

    async def lease(self, message: LeaseVersion, sender: str, url: str) -> VersionLease:
        """Lease the live version. url: root of this server, as the one who asks reaches it. Raises `Fenced`."""
        if not self._can_keep:
            raise Fenced("this server has room for one version (server.stage_weights = false), so it can keep none")
        if len(self._leases) >= MOST_LEASES:
            raise Fenced(f"{MOST_LEASES} servers get their weights from this one already; ask again later")
        pin = ExitStack()
        held = pin.enter_context(self._live.pinned())
        if message.version not in (None, held.version):
            pin.close()
            raise Fenced(f"version {held.version} is live here, and not {message.version}")
        if len({lease.held.version for lease in self._leases.values()} - {held.version}) > 1:
            pin.close()
            raise Fenced("this server keeps two older versions for others already; ask again later")
        name = secrets.token_urlsafe(24)
        offer = replace(offered(held, sender, message.bucket_bytes), location=f"{url}/weights/buckets/{name}")
        ends = self._loop.call_later(message.lease_s, self._end, name)
        self._leases[name] = _Lease(held, offer, pin, ends)
        return VersionLease(held.version, await asyncio.to_thread(held.digest), offer)

    async def bucket(self, name: str, index: int) -> Tensor:
        """Return the bucket's bytes (uint8). Raises `Unusable` where there is no such lease, or not any more."""
        lease = self._leases.get(name)
        if lease is None or not 0 <= index < len(lease.offer.buckets):
            raise Unusable("no lease of this name has such a bucket: it may be over")
        content = await asyncio.to_thread(content_of, lease.held, lease.offer.buckets[index])
        if name not in self._leases:
            raise Unusable("the lease is over")
        return content

    def end(self, location: str) -> None:
        """Keep the version for this lease no longer. Nothing happens where it is over."""
        if (name := location.rpartition("/")[2]) in self._leases:
            self._end(name)

    def close(self) -> None:
        for name in list(self._leases):
            self._end(name)

    def _end(self, name: str) -> None:
        lease = self._leases.pop(name)
        lease.ends.cancel()
        lease.pin.close()


def offered(held: VersionTensors, sender: str, bucket_bytes: int) -> Offer:
    whole = [
        OwnedTensor(name, held.dtypes[name], tuple(each.shape), [((0,) * each.dim(), tuple(each.shape))])
        for name, each in held.tensors.items()
    ]
    return offer_of(sender, whole, bucket_bytes)


def content_of(held: VersionTensors, bucket: Bucket) -> Tensor:
    content = torch.empty(bucket.num_bytes, dtype=torch.uint8)
    for box in bucket.boxes:
        place = tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))
        dtype = held.dtypes[box.name]
        values = held.tensors[box.name][place]
        target = content[box.offset_bytes : box.offset_bytes + box.num_bytes].view(dtype).view(values.shape)
        target.copy_(values)
    return content
