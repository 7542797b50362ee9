"""Buckets by a process group that is made for one update: a sender and its receivers, to which it broadcasts (gloo).

    sender                  receiver
    Meet                    leaves the group that it is in
                            Here
    Join                    both make the group, whose name is new each time
    Coming                  takes part in the broadcast of that bucket
                            Loaded

A group dies with any of its members: the neighbours get an error, the rest wait until a deadline, and nobody learns who
it was. So what is said goes beside it, over the control connections, which tell who died, refused or hangs. Then the
sender leaves the group, as do the others once they hear of it, and nobody waits for what hangs there; it meets the
survivors in a new one, and broadcasts the buckets that one of them still lacks again. Those are in their slots: no slot
is filled anew before. A receiver that has loaded a bucket takes part and does not load it twice.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ductile.error_text import error_text
from ductile.fabric import rendezvous
from ductile.fabric.broadcast_group import ROOT, Broadcast, BroadcastGroup
from ductile.messages.updates import Bucket, Offer, WeightUpdate
from ductile.weights.carriers.carrier import UpdateFailed, sentence
from ductile.weights.carriers.control import (
    Audience,
    Coming,
    Here,
    Join,
    Loaded,
    Meet,
    Through,
    local_address,
)
from ductile.weights.carriers.source import Source

TICK_S = 0.01
"""Time after which a broadcast that has failed is seen, while no receiver says anything."""
LOOK_S = 0.002
"""Time after which a receiver sees that a broadcast is over, while the sender says nothing. Those of all senders look,
and take a tenth of a core from what they wait for if they look four times as often."""
MEET_S = 0.5
"""A receiver that is late is waited for as long when the others meet again."""


class _Sent(NamedTuple):
    bucket: Bucket
    slot: int
    content: Tensor
    checksum: str


class PointToPointSender:
    def __init__(self, audience: Audience, update: WeightUpdate, sender: str, host: str) -> None:
        """host: address of this machine at which receivers reach it. The first group is made by `wait`, which ends when
        a receiver that does not come to it is left out."""
        self._audience = audience
        self._host, self._timeout_s = host, update.bucket_timeout_s
        self._name = f"{update.update_id}/{sender}"
        if int(update.rendezvous.rpartition(":")[2] or 0):
            self._address = update.rendezvous
            self._store: Store = rendezvous.connect(update.rendezvous, self._timeout_s)
        else:
            hosted = rendezvous.host_store(host, self._timeout_s)
            self._store, self._address = hosted, f"{host}:{hosted.port}"
        self._changing = Lock()
        self._generation = 0
        self._group: BroadcastGroup | None = None
        self._members: set[str] = set()
        self._under_way: dict[int, _Sent] = {}
        self._broadcasts: deque[Broadcast] = deque()
        self._broken = ""

    @property
    def live(self) -> bool:
        return bool(self._audience.channels)

    def send(self, bucket: Bucket, slot: int, content: Tensor, checksum: str) -> None:
        with self._changing:
            sent = self._under_way[bucket.index] = _Sent(bucket, slot, content, checksum)
            self._broadcast(sent)

    def wait(self, bucket: Bucket) -> None:
        while self._audience.lacking(bucket.index):
            self._audience.listen(TICK_S)
            with self._changing:
                self._see_broadcasts()
                # One that hangs keeps others in the broadcast with it. They are told apart as they meet again.
                late = self._audience.late(bucket.index)
                if late or self._broken or self._members != self._audience.channels.keys():
                    self._regroup(dict.fromkeys(late, bucket.index))
        with self._changing:
            del self._under_way[bucket.index]

    def leave_out(self, instance: str) -> None:
        self._audience.shut(instance)

    def close(self, reason: str = "") -> dict[str, str]:
        failed = self._audience.close(reason)
        self._drop_group()
        self._under_way.clear()
        return failed

    def _broadcast(self, sent: _Sent) -> None:
        """Begin to send a bucket to the group. Without one, or in one that is broken, the next one gets it."""
        if self._group is None or self._broken:
            return
        self._audience.tell(Coming(sent.bucket.index, sent.slot, sent.checksum))
        try:
            self._broadcasts.append(self._group.broadcast(sent.content))
        except RuntimeError as error:
            self._broken = error_text(error)

    def _see_broadcasts(self) -> None:
        while self._broadcasts and self._broadcasts[0].is_over():
            self._broken = self._broadcasts.popleft().wait() or self._broken

    def _regroup(self, late: Mapping[str, int]) -> None:
        """Meet the receivers that are left in a new group, and send again what one of them lacks. late: receivers that
        have not acknowledged a bucket in time, and which one."""
        self._drop_group()
        audience, attempts = self._audience, 0
        while audience.channels and self._group is None:
            attempts += 1
            if attempts > len(self._members) + 2:
                for instance in list(audience.channels):
                    audience.drop(instance, f"{instance} could not be met in a group: {self._broken}")
                return
            self._generation += 1
            members = self._met(late)
            size, name = len(members) + 1, f"{self._name}/{self._generation}"
            for rank, instance in enumerate(members, ROOT + 1):
                join = Join(self._generation, self._address, name, rank, size)
                audience.tell_one(instance, audience.channels[instance], join)
            self._members = {*members}
            try:
                self._group = BroadcastGroup(self._store, name, ROOT, size, self._host, self._timeout_s)
            except RuntimeError as error:
                self._broken = error_text(error)
        self._broken = ""
        for sent in sorted(self._under_way.values(), key=lambda sent: sent.bucket.index):
            if audience.lacking(sent.bucket.index):
                self._broadcast(sent)

    def _met(self, late: Mapping[str, int]) -> list[str]:
        """Return the receivers that come to the next group; the others are dropped. Who is late already has little
        time."""
        audience, until = self._audience, time.monotonic() + MEET_S
        audience.tell(Meet(self._generation))
        while missing := [name for name in list(audience.channels) if audience.generation[name] != self._generation]:
            for instance in missing:
                if time.monotonic() > max(until, audience.heard[instance] + self._timeout_s):
                    what = f"acknowledge bucket {late[instance]}" if instance in late else "come to the process group"
                    audience.drop(instance, f"{instance} did not {what} within {self._timeout_s:g} s")
            audience.listen(TICK_S)
        return sorted(audience.channels)

    def _drop_group(self) -> None:
        for broadcast in self._broadcasts:
            broadcast.abandon()
        self._broadcasts.clear()
        if self._group is not None:
            with suppress(RuntimeError):  # the store's process has ended
                rendezvous.forget(self._store, f"{self._name}/{self._generation}/")
        self._group = None


class _Arriving(NamedTuple):
    coming: Coming
    buffer: Tensor
    broadcast: Broadcast


class _Member:
    """A receiver of one sender: takes part in the broadcast of the next bucket while it loads one."""

    def __init__(self, source: Source, offer: Offer, timeout_s: float) -> None:
        self._source, self._offer, self._timeout_s = source, offer, timeout_s
        largest = max((bucket.num_bytes for bucket in offer.buckets), default=0)
        self._free = deque(torch.empty(largest, dtype=torch.uint8) for _ in range(2))
        self._arriving: deque[_Arriving] = deque()
        self._announced: deque[Coming] = deque()
        """Buckets that are on their way, and for which no buffer is free yet."""
        self._store: Store | None = None
        self._group: BroadcastGroup | None = None
        self._num_loaded = 0
        self._through = False

    def receive(self, load: Callable[[Bucket, Tensor, str], None]) -> None:
        while not self._through:
            if not self._arriving:
                self._hear()
                continue
            if not self._arriving[0].broadcast.is_over():
                self._hear(LOOK_S)  # that it meets us again, where a member that hangs keeps this from its end
                continue
            coming, buffer, broadcast = self._arriving.popleft()
            if broadcast.wait():  # a member died, of which the sender learns as well
                self.leave()
            else:
                while self._hear(0.0):
                    pass
                if coming.index == self._num_loaded:
                    bucket = self._offer.buckets[coming.index]
                    load(bucket, buffer[: bucket.num_bytes], coming.checksum)
                    self._num_loaded += 1
                    self._source.say(Loaded(coming.index))
            self._free.append(buffer)
            if self._announced and self._group is not None:
                self._take_part(self._announced.popleft(), self._group)
        if self._num_loaded < len(self._offer.buckets):
            raise UpdateFailed(f"{self._offer.sender} ended after {self._num_loaded} buckets")

    def _hear(self, wait_s: float | None = None) -> bool:
        """Do what the sender says next; False when it says nothing. wait_s: None: as long as it may be silent."""
        message = self._source.next(wait_s)
        match message:
            case None:
                return False
            case Meet(generation=generation):
                self.leave()
                self._source.say(Here(generation))
            case Join():
                with suppress(RuntimeError):  # somebody did not come: the sender gets the same error, and we meet again
                    self._store = self._store or rendezvous.connect(message.store, self._timeout_s)
                    rank, size, host = message.rank, message.size, local_address(message.store)
                    self._group = BroadcastGroup(self._store, message.name, rank, size, host, self._timeout_s)
            case Coming(index=index) if 0 <= index < len(self._offer.buckets):
                if self._group is not None:
                    self._take_part(message, self._group)
            case Through():
                self._through = True
            case _:
                raise UpdateFailed(f"{self._offer.sender} says {type(message).__name__}, which it may not")
        return True

    def _take_part(self, coming: Coming, group: BroadcastGroup) -> None:
        if not self._free:
            self._announced.append(coming)
            return
        buffer = self._free.popleft()
        content = buffer[: self._offer.buckets[coming.index].num_bytes]
        try:
            self._arriving.append(_Arriving(coming, buffer, group.broadcast(content)))
        except RuntimeError:
            self._free.append(buffer)
            self.leave()

    def leave(self) -> None:
        """Leave the group. What is under way there may hang until its timeout, and keeps its buffer."""
        while self._arriving:
            arriving = self._arriving.popleft()
            arriving.broadcast.abandon()
            self._free.append(torch.empty_like(arriving.buffer))
        self._announced.clear()
        self._group = None


def receive(source: Source, offer: Offer, timeout_s: float, load: Callable[[Bucket, Tensor, str], None]) -> None:
    """Load all buckets of one sender. Raises `UpdateFailed`."""
    member = _Member(source, offer, timeout_s)
    try:
        member.receive(load)
    except BaseException as error:
        source.fail(sentence(error))
        raise
    finally:
        source.shut()  # the sender drops the group then, in which this one may be waiting
        member.leave()
