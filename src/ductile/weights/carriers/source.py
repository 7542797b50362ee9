"""A receiver's end of the control connections of a weight update (`ductile.weights.carriers.control`)."""

import hmac
import secrets
import select
import socket
import time
from contextlib import suppress
from threading import Event

from ductile.messages.updates import WeightCarrier
from ductile.weights.carriers.carrier import UpdateFailed
from ductile.weights.carriers.channel import (
    Challenge,
    Channel,
    ConnectionEnded,
    ControlMessage,
    ReceiverHello,
    UpdateEnded,
    Welcome,
    ready,
)
from ductile.weights.carriers.control import HELLO_S, NONCE_BYTES, TICK_S, proof


class Source:
    """A receiver's connection to one sender. Its waits end when the update does."""

    def __init__(self, channel: Channel, sender: str, silence_s: float, stopped: Event) -> None:
        self._channel, self._sender = channel, sender
        self._silence_s, self._stopped = silence_s, stopped

    def next(self, wait_s: float | None = None) -> ControlMessage | None:
        """Return the next message; None where none comes within `wait_s`. Raises `UpdateFailed` when the sender ends
        the update or its connection, or the update is stopped, and where `wait_s` is None when it is silent for too
        long."""
        deadline = time.monotonic() + (self._silence_s if wait_s is None else wait_s)
        try:
            while (message := self._channel.read()) is None:
                if not self._waited(deadline):
                    if wait_s is not None:
                        return None
                    raise UpdateFailed(f"{self._sender} said nothing for {self._silence_s:g} s")
        except ConnectionEnded as error:
            raise UpdateFailed(f"{self._sender} {error}") from error
        self._refuse_stopped()
        if isinstance(message, UpdateEnded):
            raise UpdateFailed(f"{self._sender} has ended the update: {message.reason}")
        return message

    def read_into(self, content: memoryview) -> None:
        """Fill `content` with the bytes that come next. Raises `UpdateFailed` as `next` does."""
        deadline = time.monotonic() + self._silence_s
        try:
            while content:
                if size := self._channel.read_into(content):
                    content = content[size:]
                    deadline = time.monotonic() + self._silence_s
                elif not self._waited(deadline):
                    raise UpdateFailed(f"{self._sender} sent nothing for {self._silence_s:g} s")
        except ConnectionEnded as error:
            raise UpdateFailed(f"{self._sender} {error}") from error

    def _waited(self, deadline: float) -> bool:
        """Wait a while for something to read; False once the deadline is over. Raises `UpdateFailed` when the update is
        stopped."""
        left_s = deadline - time.monotonic()
        ready(self._channel, select.POLLIN, min(TICK_S, left_s))
        self._refuse_stopped()
        return left_s > 0

    def _refuse_stopped(self) -> None:
        if self._stopped.is_set():
            raise UpdateFailed("the update was stopped")

    def say(self, message: ControlMessage) -> None:
        """Send a message to the sender. Raises `UpdateFailed`."""
        try:
            self._channel.send(message)
        except ConnectionEnded as error:
            raise UpdateFailed(f"{self._sender} {error}") from error

    def fail(self, reason: str) -> None:
        """Tell the sender, if it is still there, why its bucket is not taken."""
        with suppress(ConnectionEnded):
            self._channel.send(UpdateEnded(reason[:1000]), timeout_s=TICK_S)

    def shut(self) -> None:
        """End the connection; who waits in it fails. From any thread."""
        self._channel.shut()

    def close(self) -> None:
        self._channel.close()


def connect(
    location: str,
    sender: str,
    instance: str,
    carrier: WeightCarrier,
    secret: str,
    silence_s: float,
    stopped: Event,
) -> Source:
    """Return the proven connection to a sender. Raises `UpdateFailed`."""
    host, _, port = location.rpartition(":")
    if not host or not port.isdigit():
        raise UpdateFailed(f"the location of {sender} is {location!r}; it must be host:port")
    try:
        source = Source(Channel(socket.create_connection((host, int(port)), HELLO_S)), sender, silence_s, stopped)
    except OSError as error:
        raise UpdateFailed(f"{sender} cannot be reached at {location}: {error.strerror or error}") from error
    try:
        challenge, nonce = source.next(), secrets.token_bytes(NONCE_BYTES)
        if not isinstance(challenge, Challenge):
            raise UpdateFailed(f"{location} is not {sender}: it sent no challenge")
        source.say(ReceiverHello(instance, carrier, nonce, proof(secret, "receiver", instance, challenge.nonce)))
        welcome = source.next()
        if not isinstance(welcome, Welcome) or not hmac.compare_digest(
            welcome.proof, proof(secret, "sender", instance, nonce)
        ):
            raise UpdateFailed(f"{location} is not {sender}: it does not know the update's secret")
    except BaseException:
        source.close()
        raise
    return source
