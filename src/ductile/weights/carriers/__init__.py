"""The ways that a weight update's buckets take from a rank to a server: `ductile.messages.updates.WeightCarrier`.

`ductile.weights.sender.WeightSender` is the rank's end of all of them, `receive` the server's.
"""

import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Event

from torch import Tensor

from ductile.error_text import error_text
from ductile.messages.updates import Bucket, Offer, PrepareUpdate, WeightCarrier
from ductile.weights.carriers import control, disk, http, point_to_point, shared_memory
from ductile.weights.carriers.carrier import Sink, UpdateFailed, refuse_damaged, sentence
from ductile.weights.carriers.source import Source, connect

__all__ = ["Sink", "UpdateFailed", "receive"]

SILENT_BUCKETS = 3
"""A sender may be silent for as many bucket timeouts: while it waits for other receivers to connect, to come to a
group, and to acknowledge."""


def receive(prepare: PrepareUpdate, sink: Sink, stopped: Event) -> None:
    """Give every bucket of every sender to `sink`, each sender's in a thread of its own, and return when all senders
    know that it has them.

    By carrier "http" these are the buckets of other servers' leases; those that are posted come to the server's own
    route. It blocks until then, at most the update's `total_timeout_s`. Raises `UpdateFailed`, with a sentence, when a
    sender ends or falls silent, when the sink raises, or soon after `stopped` is set; the senders learn it at once.
    """
    offers = [offer for offer in prepare.offers if prepare.carrier != "http" or http.is_lease(offer)]
    if not offers:
        return
    receiver = _Receiver(prepare, sink)
    deadline = time.monotonic() + prepare.update.total_timeout_s
    with ThreadPoolExecutor(len(offers), "weights from") as pool:
        pending = {pool.submit(receiver.take, offer) for offer in offers}
        while pending:
            done, pending = wait(pending, control.TICK_S, FIRST_EXCEPTION)
            if stopped.is_set():
                receiver.end("the update was stopped")
            elif time.monotonic() > deadline:
                receiver.end(f"the update took more than {prepare.update.total_timeout_s:g} s")
            elif any(future.exception() for future in done):
                receiver.end("another sender failed")
    if receiver.reason:
        raise UpdateFailed(receiver.reason)


class _Receiver:
    """State that the threads of one update's senders share."""

    def __init__(self, prepare: PrepareUpdate, sink: Sink) -> None:
        self._update, self._sink = prepare.update, sink
        self._carrier: WeightCarrier = prepare.carrier
        self._instance = "" if prepare.carrier == "http" else _own_instance(prepare)
        self._ended = Event()
        self._sources: list[Source] = []
        self.reason = ""
        """Reason for which the update failed, as the first thread saw it."""

    def take(self, offer: Offer) -> None:
        """Receive from one sender."""
        try:
            self._take(offer)
        except BaseException as error:
            self.end(sentence(error))
            raise

    def _take(self, offer: Offer) -> None:
        def load(bucket: Bucket, content: Tensor, checksum: str) -> None:
            refuse_damaged(offer.sender, bucket, content, checksum)
            try:
                self._sink(offer, bucket, content)
            except Exception as error:
                what = f"bucket {bucket.index} of {offer.sender} could not be loaded"
                raise UpdateFailed(f"{what}: {error_text(error)}") from error

        update, carrier = self._update, self._carrier
        if carrier == "disk":
            return disk.receive(update, offer, load, self._ended)
        if carrier == "http":
            return http.receive(update, offer, load, self._ended)
        silence_s = SILENT_BUCKETS * update.bucket_timeout_s
        at, sender = offer.location, offer.sender
        source = connect(at, sender, self._instance, carrier, update.secret, silence_s, self._ended)
        self._sources.append(source)
        try:
            if carrier == "shared_memory":
                shared_memory.receive(source, offer, load)
            else:
                point_to_point.receive(source, offer, load)
        except BaseException as error:
            source.fail(sentence(error))
            raise
        finally:
            source.close()
        return None

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._ended.set()
        for source in self._sources:
            source.fail(self.reason)
            source.shut()


def _own_instance(prepare: PrepareUpdate) -> str:
    if prepare.instance:
        return prepare.instance
    named = [receiver.instance for receiver in prepare.update.receivers if receiver.carrier == prepare.carrier]
    if len(named) != 1:
        raise UpdateFailed(f"{len(named)} receivers have the carrier {prepare.carrier}, and `instance` says not which")
    return named[0]
