"""A rank's end of weight updates: its own boxes of the weights go out from where they lie, beside training.

    begin(update)  ->  offer     a thread fills bucket after bucket and sends it (`ductile.weights.sender`)
    fence()                      before the weights change or move: until no thread reads them any more
    finish(update_id, aborted)   when the servers have changed over, or not

Nothing is gathered and nothing is copied but one bucket at a time, so an update costs a rank the sender's slots. No
rank waits for another here, and none decides anything: all get the same commands.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Event, Lock
from time import monotonic

import msgspec
from torch import Tensor

from ductile.messages.updates import (
    Bucket,
    Digest,
    Offer,
    SendReport,
    TensorBox,
    WeightUpdate,
    digest_number,
    digest_text,
)
from ductile.parallel.parts import SlotParts
from ductile.trainer.own_weights import OwnWeights
from ductile.trainer.trainer import Trainer
from ductile.weights.buckets import num_bytes_of, offer_of, only
from ductile.weights.carriers.shared_memory import RingMemory
from ductile.weights.sender import WeightSender

FINISH_S = 5.0
"""Seconds that a sender which is through, or was told to end, has to free what it holds, beside the one bucket timeout
that it may still wait for a receiver to take a message."""

BoxKey = tuple[str, tuple[int, ...]]
"""Name and start of a box: in one offer no two have the same."""


class UpdateStopped(Exception):
    """The weights may not be read any more. The text is a sentence."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """Digests of a version's boxes, as this rank has sent them: all that is kept of the version."""

    version: int
    whole_offer: Offer
    digests: Mapping[BoxKey, int]


@dataclass(slots=True)
class _Sending:
    """An update under way."""

    update: WeightUpdate
    weights: OwnWeights
    whole_offer: Offer
    """All boxes of this rank; those that are left out, too."""
    ends_at_s: float
    digests: dict[BoxKey, int] = field(default_factory=dict[BoxKey, int])
    """Digests of the boxes that were filled, or did not change."""
    offer: Offer | None = None
    """Boxes that are sent; None before that has begun."""
    sender: WeightSender | None = None
    reading: Lock = field(default_factory=Lock)
    """Held by the sender's thread while it reads a bucket's boxes."""
    stopped: str = ""
    """Why nothing may be read any more, a sentence."""
    through: Event = field(default_factory=Event)

    def fill(self, bucket: Bucket, buffer: Tensor) -> int:
        """Copy a bucket's boxes and return their digest. Raises UpdateStopped."""
        with self.reading:
            if self.stopped:
                raise UpdateStopped(self.stopped)
            parts = self.weights.copy_boxes(bucket.boxes, buffer)
            self.digests.update(zip(map(_key, bucket.boxes), parts, strict=True))
        return sum(parts)

    def stop(self, reason: str) -> None:
        """Have the weights not be read any more from now on: what is not sent yet never will be."""
        self.stopped = self.stopped or reason  # before the lock: a thread that fills one bucket after another has it
        with self.reading:
            pass
        if self.sender is not None:
            self.sender.abort()

    def num_bytes_equal(self, base: _Sent | None) -> int:
        """Return the bytes of the boxes that are as they were in `base`, another version. Of what is not trained that
        is known without one."""
        boxes = [box for bucket in self.whole_offer.buckets for box in bucket.boxes]
        if base is None or base.version == self.update.version or base.whole_offer is not self.whole_offer:
            return sum(box.num_bytes for box in boxes if box.name in self.weights.frozen)
        return sum(box.num_bytes for box in boxes if base.digests[_key(box)] == self.digests.get(_key(box)))

    def digests_by_tensor(self) -> dict[str, Digest]:
        parts = dict[str, int]()
        for (name, _), digest in self.digests.items():
            parts[name] = parts.get(name, 0) + digest
        return {name: digest_text(part) for name, part in parts.items()}

    @property
    def is_complete(self) -> bool:
        return all(_key(box) in self.digests for bucket in self.whole_offer.buckets for box in bucket.boxes)


class OutgoingWeights:
    """The updates of one train role, one at a time."""

    def __init__(self, slot: int, longest_fence_s: float, tell: Callable[[SendReport], None]) -> None:
        """longest_fence_s: seconds that the others may be kept waiting for this rank in a collective.

        tell: called by a thread of its own, once for each update."""
        self._slot, self._longest_fence_s, self._tell = slot, longest_fence_s, tell
        self._lock = Lock()
        """Held where an update begins or ends; `finish` and `leave_out` come from threads beside."""
        self._sending: _Sending | None = None
        self._finished = ""
        """The latest update that is over: a finish may come before its begin."""
        self._whole_offer: tuple[SlotParts, int, Offer] | None = None
        self._committed: _Sent | None = None
        self._memory = RingMemory()

    def begin(self, update: WeightUpdate, trainer: Trainer, state: Mapping[str, Tensor]) -> Offer:
        """Send the weights as they are; `state` is this rank's part of the trainer's (`trainer.state`).

        An earlier update that was not finished is aborted. Raises ValueError for one that was finished before.
        """
        with self._lock:
            if update.update_id == self._finished:
                raise ValueError(f"update {update.update_id} was finished before this slot had begun it")
            sending = self._sending
            if sending is not None and sending.update.update_id == update.update_id and sending.offer is not None:
                return sending.offer
            self._end(f"update {update.update_id} began")
            sending = self._prepared(update, trainer, state)
            base = self._base(sending)
            offer = self._changed(sending, base)
            unchanged = sum(sending.digests.values())
            left_out = num_bytes_of(sending.whole_offer) - num_bytes_of(offer)

            def tell(report: SendReport) -> None:
                sending.through.set()
                digest = digest_text(digest_number(report.digest) + unchanged)
                equal = sending.num_bytes_equal(self._committed)
                parts = sending.digests_by_tensor() if sending.is_complete else {}
                more = {"num_bytes_unchanged": left_out, "num_bytes_equal": equal, "tensors": parts}
                self._tell(msgspec.structs.replace(report, digest=digest, **more))

            sending.sender = WeightSender(update, offer, sending.fill, tell, self._memory)
            sending.offer = sending.sender.start()
            self._sending = sending
            return sending.offer

    def fence(self, action: str) -> None:
        """Wait until the weights are not read any more: the optimizer's next step, say, may change them. A sender that
        takes longer than its update may is aborted.

        action: what waits, such as "OptimStep"."""
        sending = self._sending
        if sending is None:
            return
        left_s = min(self._longest_fence_s, sending.ends_at_s - monotonic())
        if not sending.through.wait(max(0.0, left_s)):
            sending.stop(
                f"{action} waited for {sending.whole_offer.sender} to send its weights until the update's deadline"
            )

    def leave_out(self, update_id: str, instance: str, reason: str) -> None:
        """Do not wait for a receiver of the update. Nothing happens where it is not under way."""
        sending = self._sending
        if sending is not None and sending.update.update_id == update_id and sending.sender is not None:
            sending.sender.leave_out(instance, reason)

    def finish(self, update_id: str, aborted: bool) -> None:
        """Free what an update holds. One that is not under way is over already."""
        with self._lock:
            self._finished = update_id
            sending = self._sending
            if sending is None or sending.update.update_id != update_id:
                return
            if not aborted and not sending.stopped and sending.is_complete:
                self._committed = _Sent(sending.update.version, sending.whole_offer, sending.digests)
            self._end("the update was aborted" if aborted else "the update was finished")

    def close(self) -> None:
        """Raises TimeoutError for a sender that is stuck; it has nothing then that the next role needs."""
        with ExitStack() as ending:
            ending.callback(self._memory.close)
            self.fence("the role's end")
            with self._lock:
                self._end("the role ended")

    def _end(self, reason: str) -> None:
        sending = self._sending
        if sending is None or sending.sender is None:
            return
        if not sending.through.is_set():
            sending.stop(reason)
        self._sending = None  # not before: a fence that finds none lets the weights change
        sending.sender.finish(FINISH_S + sending.update.bucket_timeout_s)

    def _prepared(self, update: WeightUpdate, trainer: Trainer, state: Mapping[str, Tensor]) -> _Sending:
        weights = OwnWeights.of(trainer, state)
        known = self._whole_offer
        if known is None or known[0] is not weights.parts or known[1] != update.bucket_bytes:
            offer = offer_of(f"slot-{self._slot}", weights.tensors(), update.bucket_bytes)
            known = self._whole_offer = weights.parts, update.bucket_bytes, offer
        return _Sending(update, weights, known[2], monotonic() + update.total_timeout_s)

    def _base(self, sending: _Sending) -> _Sent | None:
        """The version that the update builds on, where this rank has sent it in the same boxes."""
        base = self._committed
        if base is None or base.version != sending.update.base_version or base.whole_offer is not sending.whole_offer:
            return None
        return base

    @staticmethod
    def _changed(sending: _Sending, base: _Sent | None) -> Offer:
        """The boxes that are not as they were in the version that the update builds on, if it does: what is not trained
        never changes, and the rest is compared with `base`. The digests of those that are left out are known."""
        weights, offer = sending.weights, sending.whole_offer
        if sending.update.base_version is None:
            return offer
        known, frozen = base.digests if base else dict[BoxKey, int](), weights.frozen
        for box in (box for bucket in offer.buckets for box in bucket.boxes):
            key, place = _key(box), (box.start, box.stop)
            if box.name in frozen:
                sending.digests[key] = known[key] if key in known else weights.digest(box.name, place)
            elif key in known and (digest := weights.digest(box.name, place)) == known[key]:
                sending.digests[key] = digest
        if not sending.digests:
            return offer
        return only(offer, sending.update.bucket_bytes, lambda box: _key(box) not in sending.digests)


def _key(box: TensorBox) -> BoxKey:
    return box.name, box.start
