"""Control connections of a weight update: few and small messages between one sender and its receivers, beside the
bytes, which mostly take another way.

    sender                                        receiver
    ControlListener(...)                                 connect(location, ...)
    listener.gather(...) -> {instance: Channel}   <- the connection, both sides proven
    Audience: tell, listen, drop                  Source: next, say

A receiver connects to every sender. Each proves the update's secret to the other before anything else is said, and the
secret itself is never sent. A connection that ends is a death that is known at once: no timeout is waited for.
"""

import hmac
import ipaddress
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping

from ductile.messages.updates import WeightCarrier
from ductile.transport.sockets import LOOPBACK
from ductile.weights.carriers.channel import (
    Challenge,
    Channel,
    Coming,
    ConnectionEnded,
    ControlMessage,
    Loaded,
    ReceiverHello,
    Through,
    UpdateEnded,
    Welcome,
)

NONCE_BYTES = 16
HELLO_S = 5.0
"""A stranger that connects has so long to prove itself."""
MAX_UNPROVEN = 64
"""Connections at most that have not proven themselves. For one more, the one that has had most time for it is closed: a
stranger that connects and says nothing keeps no receiver out, and takes no more descriptors."""
TICK_S = 0.05
"""Time after which a wait sees that its update has been ended."""


class ControlListener:
    """The socket at which receivers find a sender."""

    def __init__(self, near: str = "") -> None:
        """near: host:port of a place that all take part in; where that is another machine, the socket is on the
        interface that leads there, and else on loopback. Raises OSError."""
        host = local_address(near)
        self._socket = socket.create_server((host, 0), backlog=128)
        self._socket.setblocking(False)
        self.location = f"{host}:{self._socket.getsockname()[1]}"

    def gather(
        self,
        secret: str,
        expected: Mapping[str, WeightCarrier],
        timeout_s: float,
        awaited: Callable[[str], bool] = lambda _: True,
    ) -> dict[str, Channel]:
        """Return the connections of the receivers that come in time, each proven, as soon as all that are `awaited`
        have come; strangers do not hold it up."""
        arrived: dict[str, Channel] = {}
        unproven: dict[Channel, tuple[bytes, float]] = {}
        deadline = time.monotonic() + timeout_s
        try:
            while time.monotonic() < deadline and any(map(awaited, expected.keys() - arrived.keys())):
                poll = select.poll()
                for waiting in (self._socket, *unproven):
                    poll.register(waiting.fileno(), select.POLLIN)
                poll.poll(TICK_S * 1000)
                self._accept(unproven)
                for channel, (nonce, until) in list(unproven.items()):
                    try:
                        instance = _prove(channel, secret, nonce, expected)
                    except ConnectionEnded:
                        instance = None
                    if instance is None or (not instance and time.monotonic() > until):
                        del unproven[channel]
                        channel.close()
                    elif instance:
                        del unproven[channel]
                        if earlier := arrived.get(instance):
                            earlier.close()  # it began anew
                        arrived[instance] = channel
        finally:
            for channel in unproven:
                channel.close()
        return arrived

    def _accept(self, unproven: dict[Channel, tuple[bytes, float]]) -> None:
        while True:
            try:
                channel = Channel(self._socket.accept()[0])
            except OSError:
                return
            if len(unproven) >= MAX_UNPROVEN:
                longest = next(iter(unproven))
                del unproven[longest]
                longest.close()
            nonce = secrets.token_bytes(NONCE_BYTES)
            try:
                channel.send(Challenge(nonce), timeout_s=0)
            except ConnectionEnded:
                channel.close()
            else:
                unproven[channel] = nonce, time.monotonic() + HELLO_S

    def close(self) -> None:
        self._socket.close()


def _prove(channel: Channel, secret: str, nonce: bytes, expected: Mapping[str, WeightCarrier]) -> str:
    """Return the instance that a new connection is of, once it has proven it; "" while it has said nothing. Raises
    `ConnectionEnded`."""
    message = channel.read()
    if message is None:
        return ""
    if not isinstance(message, ReceiverHello) or expected.get(message.instance) != message.carrier:
        raise ConnectionEnded("is no receiver of this update")
    if not hmac.compare_digest(message.proof, proof(secret, "receiver", message.instance, nonce)):
        raise ConnectionEnded("does not know the update's secret")
    channel.send(Welcome(proof(secret, "sender", message.instance, message.nonce)))
    return message.instance


def proof(secret: str, side: str, instance: str, nonce: bytes) -> bytes:
    """Return what shows that one side knows the secret: only with it can it be made, for this nonce."""
    return hmac.digest(secret.encode(), f"{side} {instance} ".encode() + nonce, "sha256")


def local_address(near: str) -> str:
    """Return the address of this machine that those at `near` (host:port) reach; loopback for "" and for what is
    local."""
    host, _, port = near.rpartition(":")
    if not host:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port) or 1))  # sends nothing: the kernel only looks the route up
        address = probe.getsockname()[0]
        local = ipaddress.ip_address(address)
    return LOOPBACK if local.is_loopback else address


class Audience:
    """The receivers of one sender by one carrier, over their channels. Who fails is dropped, with a sentence."""

    def __init__(self, channels: Mapping[str, Channel], timeout_s: float) -> None:
        self.channels = dict(channels)
        """Channels that are left, by instance."""
        self.failed: dict[str, str] = {}
        self.num_loaded = dict.fromkeys(channels, 0)
        self.timeout_s = timeout_s
        self.heard = dict.fromkeys(channels, time.monotonic())
        """Time at which each has last said something, or was told of a bucket while it had nothing to do."""
        self._all = list(channels.values())
        self._unsent = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Wakes who listens when there is something left to be sent, or a connection has ended."""
        self._ended: dict[str, str] = {}
        """Sentences by instance to which nothing can be sent any more: what it has said last is still to be read."""

    def tell(self, message: ControlMessage, content: memoryview | None = None) -> None:
        """Send a message and the bytes that follow it to all. What a socket does not take at once is sent by
        `listen`."""
        now = time.monotonic()
        for instance, channel in list(self.channels.items()):
            if isinstance(message, Coming) and self.num_loaded[instance] >= message.index:
                self.heard[instance] = now  # it has had nothing to do so far
            try:
                channel.post(message, content)
            except ConnectionEnded as error:
                self._ended.setdefault(instance, f"{instance} {error}")
            if channel.has_unsent or instance in self._ended:
                os.eventfd_write(self._unsent, 1)

    def listen(self, timeout_s: float = TICK_S) -> None:
        """Take what receivers say, and send what is left to be sent, at most so long."""
        poll = select.poll()
        poll.register(self._unsent, select.POLLIN)
        by_fileno = {channel.fileno(): (instance, channel) for instance, channel in list(self.channels.items())}
        for fileno, (_, channel) in by_fileno.items():
            poll.register(fileno, select.POLLIN | select.POLLOUT if channel.has_unsent else select.POLLIN)
        for fileno, _ in poll.poll(timeout_s * 1000):
            if fileno == self._unsent:
                os.eventfd_read(self._unsent)
                continue
            instance, channel = by_fileno[fileno]
            if self._read(instance, channel):
                try:
                    channel.flush()
                except ConnectionEnded as error:
                    self._ended.setdefault(instance, f"{instance} {error}")
        self._drop_ended()

    def _read(self, instance: str, channel: Channel) -> bool:
        """Take what a receiver has said. Returns False where it has failed, and is dropped."""
        try:
            while (message := channel.read()) is not None:
                self._take(instance, message)
        except ConnectionEnded as error:
            self.drop(instance, f"{instance} {error}")
            return False
        return True

    def _drop_ended(self) -> None:
        """Drop those to whom nothing can be sent any more, for the reason that they have said, if there is one."""
        for instance in list(self._ended):
            why, channel = self._ended.pop(instance), self.channels.get(instance)
            if channel is not None and self._read(instance, channel):
                self.drop(instance, why)

    def _take(self, instance: str, message: ControlMessage) -> None:
        self.heard[instance] = time.monotonic()
        match message:
            case Loaded(index=index) if index == self.num_loaded[instance]:
                self.num_loaded[instance] += 1
            case UpdateEnded(reason=reason):
                raise ConnectionEnded(f"failed: {reason}")
            case _:
                raise ConnectionEnded(f"says {type(message).__name__}, which it may not")

    def lacking(self, index: int) -> list[str]:
        """Return the receivers that have not loaded a bucket yet."""
        return [instance for instance in list(self.channels) if self.num_loaded[instance] <= index]

    def late(self, index: int) -> list[str]:
        """Return the receivers that lack a bucket and have said nothing for too long."""
        now = time.monotonic()
        return [instance for instance in self.lacking(index) if now - self.heard[instance] > self.timeout_s]

    def drop_late(self, index: int) -> None:
        for instance in self.late(index):
            self.drop(instance, f"{instance} did not acknowledge bucket {index} within {self.timeout_s:g} s")

    def drop(self, instance: str, reason: str) -> None:
        if channel := self.channels.pop(instance, None):
            self.failed[instance] = reason
            channel.shut()  # and is closed at the end: the other thread may just wait for it

    def shut(self, instance: str) -> None:
        """End the connection to a receiver, which `listen` then drops. From any thread."""
        if channel := self.channels.get(instance):
            channel.shut()

    def close(self, reason: str) -> dict[str, str]:
        """Tell all that are left that they have everything, or drop them for this reason. Returns who failed."""
        self.tell(UpdateEnded(reason) if reason else Through())
        self._drop_ended()
        for instance in list(self.channels) if reason else ():
            self.drop(instance, f"{instance} has not got everything: {reason}")
        for channel in self._all:
            channel.close()
        os.close(self._unsent)
        return self.failed
