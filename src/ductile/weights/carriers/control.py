"""Control connections of a weight update: few and small messages between one sender and its receivers, beside the
bytes, which take another way.

    sender                                        receiver
    ControlListener(...)                                 connect(location, ...)
    listener.gather(...) -> {instance: Channel}   <- the connection, both sides proven
    Audience: tell, listen, drop                  Channel: receive, send

A receiver connects to every sender. Each proves the update's secret to the other before anything else is said, and the
secret itself is never sent. A connection that ends is a death that is known at once: no timeout is waited for.
"""

import hmac
import ipaddress
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from ductile.messages.updates import WeightCarrier
from ductile.transport.sockets import LOOPBACK

MAX_MESSAGE_BYTES = 1 << 16
NONCE_BYTES = 16
HELLO_S = 5.0
"""A stranger that connects has so long to prove itself."""
TICK_S = 0.05
"""Time after which a wait sees that its update has been ended."""


class Challenge(msgspec.Struct, frozen=True, tag=True):
    nonce: bytes


class ReceiverHello(msgspec.Struct, frozen=True, tag=True):
    """A receiver says who it is, proves it, and asks the same of the sender."""

    instance: str
    carrier: WeightCarrier
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    proof: bytes


class Ring(msgspec.Struct, frozen=True, tag=True):
    """The slots that the sender fills, in shared memory: bucket by bucket, each in one of them."""

    location: str
    num_slots: int
    slot_bytes: int


class Meet(msgspec.Struct, frozen=True, tag=True):
    """A process group is about to be made; what was under way in the last one is sent again in it."""

    generation: int


class Here(msgspec.Struct, frozen=True, tag=True):
    """The receiver has left the last group and comes to the next one."""

    generation: int


class Join(msgspec.Struct, frozen=True, tag=True):
    """All who have come make the group now."""

    generation: int
    store: str
    name: str
    rank: int
    size: int


class Coming(msgspec.Struct, frozen=True, tag=True):
    """A bucket is in its slot (shared_memory), or is sent to the group next (point_to_point)."""

    index: int
    slot: int
    checksum: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    index: int


class UpdateEnded(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Through(msgspec.Struct, frozen=True, tag=True):
    """The sender knows that the receiver has all buckets. One that was given up in between never hears it."""


ControlMessage = (
    Challenge | ReceiverHello | Welcome | Ring | Meet | Here | Join | Coming | Loaded | UpdateEnded | Through
)
_DECODER = msgspec.msgpack.Decoder(ControlMessage)


class ConnectionEnded(Exception):
    """The other side is gone, has ended the connection, or says what it may not. The text is for after its name."""


class Channel:
    """Messages over a connected socket, each with its length before it."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: ControlMessage, timeout_s: float = HELLO_S) -> None:
        """Send a message. Raises `ConnectionEnded`, also where it was not taken within `timeout_s`."""
        body = msgspec.msgpack.encode(message)
        left = memoryview(len(body).to_bytes(4, "big") + body)
        deadline = time.monotonic() + timeout_s
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                if not ready(self, select.POLLOUT, deadline - time.monotonic()):
                    raise ConnectionEnded(f"took no message for {timeout_s:g} s") from None
            except OSError as error:
                raise ConnectionEnded(f"ended the connection ({error.strerror})") from error

    def read(self) -> list[ControlMessage]:
        """Return all messages that are there, without waiting. Raises `ConnectionEnded` once all have been returned."""
        messages = self._decoded()
        while not messages:
            try:
                received = self._socket.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                raise ConnectionEnded(f"ended the connection ({error.strerror})") from error
            if not received:
                raise ConnectionEnded("ended the connection")
            self._buffer += received
            messages = self._decoded()
        return messages

    def shut(self) -> None:
        """End the connection, for both sides; a thread that waits in it sees that. From any thread."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _decoded(self) -> list[ControlMessage]:
        messages: list[ControlMessage] = []
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if size > MAX_MESSAGE_BYTES:
                raise ConnectionEnded(f"sent a message of {size} bytes")
            if len(self._buffer) < 4 + size:
                break
            try:
                messages.append(_DECODER.decode(self._buffer[4 : 4 + size]))
            except msgspec.MsgspecError as error:
                raise ConnectionEnded(f"sent what is no message: {error}") from error
            del self._buffer[: 4 + size]
        return messages


def ready(channel: Channel, events: int, timeout_s: float) -> bool:
    """Wait until something can be read or written; False where it cannot in time."""
    poll = select.poll()
    poll.register(channel.fileno(), events)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


# -- The sender's end -----------------------------------------------------------------------------------------------


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
    for message in channel.read():
        if not isinstance(message, ReceiverHello) or expected.get(message.instance) != message.carrier:
            raise ConnectionEnded("is no receiver of this update")
        if not hmac.compare_digest(message.proof, proof(secret, "receiver", message.instance, nonce)):
            raise ConnectionEnded("does not know the update's secret")
        channel.send(Welcome(proof(secret, "sender", message.instance, message.nonce)))
        return message.instance
    return ""


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
        self.generation = dict.fromkeys(channels, 0)
        """Group that each has said to come to (point_to_point)."""
        self.timeout_s = timeout_s
        self.heard = dict.fromkeys(channels, time.monotonic())
        """Time at which each has last said something, or was told of a bucket while it had nothing to do."""
        self._all = list(channels.values())

    def tell(self, message: ControlMessage) -> None:
        now = time.monotonic()
        for instance, channel in list(self.channels.items()):
            if isinstance(message, Coming) and self.num_loaded[instance] >= message.index:
                self.heard[instance] = now  # it has had nothing to do so far
            self.tell_one(instance, channel, message)

    def tell_one(self, instance: str, channel: Channel, message: ControlMessage) -> None:
        try:
            channel.send(message, self.timeout_s)
        except ConnectionEnded as error:
            self.drop(instance, f"{instance} {error}")

    def listen(self, timeout_s: float = TICK_S) -> None:
        """Take what receivers say, at most so long."""
        poll = select.poll()
        by_fileno = {channel.fileno(): (instance, channel) for instance, channel in list(self.channels.items())}
        for fileno in by_fileno:
            poll.register(fileno, select.POLLIN)
        for fileno, _ in poll.poll(timeout_s * 1000):
            instance, channel = by_fileno[fileno]
            try:
                for message in channel.read():
                    self._take(instance, message)
            except ConnectionEnded as error:
                self.drop(instance, f"{instance} {error}")

    def _take(self, instance: str, message: ControlMessage) -> None:
        self.heard[instance] = time.monotonic()
        match message:
            case Loaded(index=index) if index == self.num_loaded[instance]:
                self.num_loaded[instance] += 1
            case Here(generation=generation):
                self.generation[instance] = generation
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
        for instance, channel in list(self.channels.items()):
            self.tell_one(instance, channel, UpdateEnded(reason) if reason else Through())
            if reason:
                self.drop(instance, f"{instance} has not got everything: {reason}")
        for channel in self._all:
            channel.close()
        return self.failed
