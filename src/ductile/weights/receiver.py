"""A server's end of a weight update: takes the buckets of all senders, whichever way they come."""

from threading import Event

from ductile.messages.updates import PrepareUpdate
from ductile.weights.carriers.carrier import Sink, UpdateFailed


def receive(prepare: PrepareUpdate, instance: str, sink: Sink, stopped: Event) -> None:
    """Give every bucket of every sender to `sink`, one at a time, and return when all senders know that it has them.

    For all carriers but "http", where the server's own route takes the buckets. It blocks until then, at most the
    update's `total_timeout_s`. Raises `UpdateFailed`, with a sentence, when a sender ends or falls silent, when the sink
    raises, or soon after `stopped` is set; the sender is then told, or learns it from the end of the connection.
    """
    raise UpdateFailed(f"{prepare.carrier} cannot be received yet")
