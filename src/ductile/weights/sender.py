"""A rank's end of one weight update: fills bucket after bucket from its own parameters, and sends each to all.

    sender = WeightSender(update, offer, fill, tell, memory)
    offer = sender.start()          goes to the servers: it says where the sender is found
    ...                             a thread sends; `tell(report)` when it is through, once
    sender.finish(timeout_s)        when the update has been committed or aborted

A bucket is filled once, in memory that all carriers send from. A receiver that dies, hangs or refuses is dropped, with
a sentence, and the others go on. The memory is `num_slots + 1` buckets; those that are not needed are never touched.
"""

import time
from collections.abc import Callable
from threading import Event, Thread

import msgspec
from torch import Tensor

from ductile.error_text import error_text
from ductile.messages.updates import Bucket, Offer, SendReport, WeightCarrier, WeightUpdate, digest_text
from ductile.weights.carriers.carrier import BucketSender, checksum_of
from ductile.weights.carriers.control import Audience, ControlListener
from ductile.weights.carriers.disk import DiskSender
from ductile.weights.carriers.http import HttpSender
from ductile.weights.carriers.point_to_point import PointToPointSender
from ductile.weights.carriers.shared_memory import RingMemory, SharedMemorySender, SlotRing
from ductile.weights.pipeline import BucketPipeline, Stage, StageSpan

Fill = Callable[[Bucket, Tensor], int]
"""Copies a bucket's boxes into the buffer (uint8, of the bucket's bytes), and returns their part of the digest."""

CONNECTED = ("shared_memory", "point_to_point")
"""Carriers whose receivers connect to the sender."""


class SendingEnded(Exception):
    """Nobody is left to send to, or the update has been ended. The text is a sentence."""


class WeightSender:
    def __init__(
        self,
        update: WeightUpdate,
        offer: Offer,
        fill: Fill,
        tell: Callable[[SendReport], None],
        memory: RingMemory,
    ) -> None:
        """tell: called by the sender's thread with the report, once, also when everything failed.

        memory: where an earlier update's buckets were filled, and the next one's are."""
        self._memory = memory
        self._update, self._offer, self._fill, self._tell = update, offer, fill, tell
        self._thread = Thread(target=self._run, name=f"weights of {offer.sender}", daemon=True)
        self._num_slots = min(update.num_slots, max(1, len(offer.buckets)))
        self._failed: dict[str, str] = {}
        self._left_out: dict[str, str] = {}
        self._aborted = Event()
        self._listener: ControlListener | None = None
        self._carriers: list[BucketSender] = []
        self._met = False
        """True once all carriers are made, with the receivers that came."""
        self._disk: DiskSender | None = None
        self._digest = 0
        self._num_bytes = 0
        self.trace: list[StageSpan] = []
        """`BucketPipeline.trace` of this update."""

    def start(self) -> Offer:
        """Begin. Returns the offer with `location`: where receivers find this sender. Raises OSError."""
        if any(receiver.carrier in CONNECTED for receiver in self._update.receivers):
            self._listener = ControlListener(self._update.rendezvous)
        self._deadline = time.monotonic() + self._update.total_timeout_s
        self._thread.start()
        return msgspec.structs.replace(self._offer, location=self._listener.location if self._listener else "")

    def leave_out(self, instance: str, reason: str) -> None:
        """Do not wait for a receiver that will not come, such as one that refused to prepare. From any thread."""
        self._left_out[instance] = reason
        for carrier in list(self._carriers):
            carrier.leave_out(instance)

    def abort(self) -> None:
        """End soon: the receivers that are not through fail. From any thread; `finish` waits for it."""
        self._aborted.set()
        for receiver in self._update.receivers:
            self.leave_out(receiver.instance, "the update was aborted")

    def finish(self, timeout_s: float) -> None:
        """Wait until the thread has ended and free what the update still has. Raises `TimeoutError` after so long."""
        deadline = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the thread that sends update {self._update.update_id} is still at work")
        if self._disk:
            self._disk.remove(deadline - time.monotonic())

    # -- In the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        began, reason, ring = time.monotonic(), "", None
        try:
            ring = self._memory.take(
                self._num_slots + 1, max((each.num_bytes for each in self._offer.buckets), default=0)
            )
            self._send(ring)
        except SendingEnded as ended:
            reason = str(ended)
        except BaseException as error:
            reason = f"{self._offer.sender} could not go on: {error_text(error)}"
        for carrier in self._carriers:
            self._failed |= carrier.close(reason)
        self._carriers.clear()
        if self._listener:
            self._listener.close()
        if ring is not None and (reason or self._failed):
            ring.close()  # who failed may still be at work there
        elif ring is not None:
            self._memory.keep(ring)
        for receiver in self._update.receivers if reason else ():
            self._failed.setdefault(receiver.instance, f"{receiver.instance} has not got everything: {reason}")
        for instance in self._failed.keys() & self._left_out.keys():
            self._failed[instance] = f"{instance} was left out: {self._left_out[instance]}"
        seconds = time.monotonic() - began
        update_id, sender = self._update.update_id, self._offer.sender
        self._tell(SendReport(update_id, sender, digest_text(self._digest), self._num_bytes, seconds, self._failed))

    def _send(self, ring: SlotRing) -> None:
        self._reach_out()
        for bucket in self._offer.buckets[:1]:
            ring.slot(0, bucket.num_bytes)  # where there is no memory for it, nobody is waited for
        self._meet(ring)

        def fill(bucket: Bucket, slot: int) -> None:
            self._go_on()
            content = ring.slot(slot, bucket.num_bytes)
            self._digest += self._fill(bucket, content)
            checksum = checksum_of(content) if self._update.verify == "crc" else ""
            for carrier in self._carriers:
                carrier.send(bucket, slot, content, checksum)

        def load(bucket: Bucket, slot: int) -> None:
            for carrier in self._carriers:
                carrier.wait(bucket)
            self._num_bytes += bucket.num_bytes
            self._go_on()

        # Sending only begins in the first: a stage of its own would be one more thread to wake for each bucket.
        stages = [Stage("fill", fill), Stage("load", load, finishes=True)]
        pipeline = BucketPipeline(stages, self._num_slots, self._look)
        self.trace = pipeline.trace
        pipeline.run(self._offer.buckets)

    def _reach_out(self) -> None:
        """Make the carriers whose receivers do not connect to this sender."""
        update = self._update
        if by_http := [receiver for receiver in update.receivers if receiver.carrier == "http"]:
            self._carriers.append(HttpSender(update, self._offer.sender, by_http))
        if by_disk := [receiver.instance for receiver in update.receivers if receiver.carrier == "disk"]:
            self._disk = DiskSender(update, self._offer.sender, by_disk)
            self._carriers.append(self._disk)

    def _meet(self, ring: SlotRing) -> None:
        """Make the other carriers, with the receivers that come in time. Raises `SendingEnded` where there are none at
        all."""
        if self._listener is not None:
            self._take_in(self._listener, ring)
        for instance in list(self._left_out):
            for carrier in self._carriers:
                carrier.leave_out(instance)
        self._met = True
        self._go_on()

    def _take_in(self, listener: ControlListener, ring: SlotRing) -> None:
        """Wait for the receivers that connect to this sender."""
        update = self._update
        expected: dict[str, WeightCarrier] = {
            receiver.instance: receiver.carrier for receiver in update.receivers if receiver.carrier in CONNECTED
        }
        arrived = listener.gather(
            update.secret, expected, update.bucket_timeout_s, lambda instance: instance not in self._left_out
        )
        for instance in expected.keys() - arrived.keys():
            self._failed[instance] = f"{instance} did not connect within {update.bucket_timeout_s:g} s"
        for carrier in CONNECTED:
            channels = {instance: channel for instance, channel in arrived.items() if expected[instance] == carrier}
            if not channels:
                continue
            audience = Audience(channels, update.bucket_timeout_s)
            self._carriers.append(
                SharedMemorySender(audience, ring) if carrier == "shared_memory" else PointToPointSender(audience)
            )

    def _look(self) -> None:
        """Have nobody wait any longer, in a carrier either, when the update has been ended. Raises `SendingEnded`."""
        try:
            self._go_on()
        except SendingEnded as ended:
            for receiver in self._update.receivers:
                self._left_out.setdefault(receiver.instance, str(ended))
                self.leave_out(receiver.instance, self._left_out[receiver.instance])
            raise

    def _go_on(self) -> None:
        """Raise `SendingEnded` when the update was aborted, is late, or has no receiver left."""
        if self._aborted.is_set():
            raise SendingEnded("the update was aborted")
        if time.monotonic() > self._deadline:
            raise SendingEnded(f"the update took more than {self._update.total_timeout_s:g} s")
        if self._met and not any(carrier.live for carrier in self._carriers):
            raise SendingEnded("no receiver is left")
