"""What a sender and its receivers say to each other in a weight update, and the connection on which they do."""

import select
import socket
import time
from collections import deque
from contextlib import suppress
from itertools import islice
from threading import Lock

import msgspec

from ductile.messages.updates import WeightCarrier

MAX_MESSAGE_BYTES = 1 << 16
READ_BYTES = 1 << 12
"""Bytes that are read at a time where a message is due: few, as those of a bucket that follow it are copied twice."""
MOST_AT_ONCE = 8
"""Pieces of memory that are sent in one call."""
SEND_S = 5.0
"""Time that the other side has to take a message."""


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


class Coming(msgspec.Struct, frozen=True, tag=True):
    """A bucket is in its slot (shared_memory), or its bytes come next (point_to_point)."""

    index: int
    slot: int
    checksum: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    index: int


class UpdateEnded(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Through(msgspec.Struct, frozen=True, tag=True):
    """The sender knows that the receiver has all buckets. One that was given up in between never hears it."""


ControlMessage = Challenge | ReceiverHello | Welcome | Ring | Coming | Loaded | UpdateEnded | Through
_DECODER = msgspec.msgpack.Decoder(ControlMessage)


class ConnectionEnded(Exception):
    """The other side is gone, has ended the connection, or says what it may not. The text is for after its name."""


class Channel:
    """Messages over a connected socket, each with its length before it, and a bucket's bytes behind the one that
    announces them. Sends from any thread, reads from one."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._buffer = bytearray()
        self._sending = Lock()
        self._unsent: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Return whether there is something to `flush`."""
        return bool(self._unsent)

    def post(self, message: ControlMessage, content: memoryview | None = None) -> None:
        """Send a message and the bytes that follow it, as far as the socket takes them at once; `flush` sends the rest.
        Raises `ConnectionEnded`."""
        body = msgspec.msgpack.encode(message)
        with self._sending:
            self._unsent.append(memoryview(len(body).to_bytes(4, "big") + body))
            if content:
                self._unsent.append(content)
        self.flush()

    def flush(self) -> None:
        """Send what was posted, as far as the socket takes it. Raises `ConnectionEnded`."""
        with self._sending:
            while self._unsent:
                try:
                    sent = self._socket.sendmsg(list(islice(self._unsent, MOST_AT_ONCE)))
                except BlockingIOError:
                    return
                except OSError as error:
                    self._unsent.clear()
                    raise ConnectionEnded(f"ended the connection ({error.strerror})") from error
                while self._unsent and sent >= len(self._unsent[0]):
                    sent -= len(self._unsent.popleft())
                if sent:
                    self._unsent[0] = self._unsent[0][sent:]

    def send(self, message: ControlMessage, timeout_s: float = SEND_S) -> None:
        """Send a message. Raises `ConnectionEnded`, also where it was not taken within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self.post(message)
        while self._unsent:
            if not ready(self, select.POLLOUT, deadline - time.monotonic()):
                raise ConnectionEnded(f"took no message for {timeout_s:g} s")
            self.flush()

    def read(self) -> ControlMessage | None:
        """Return the next message; None where it is not there yet. Raises `ConnectionEnded`."""
        while (message := self._decoded()) is None:
            try:
                received = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                return None
            except OSError as error:
                raise ConnectionEnded(f"ended the connection ({error.strerror})") from error
            if not received:
                raise ConnectionEnded("ended the connection")
            self._buffer += received
        return message

    def read_into(self, content: memoryview) -> int:
        """Fill the beginning of `content` with bytes that come next, and return how many; 0 where none is there yet.
        Raises `ConnectionEnded`."""
        if size := min(len(self._buffer), len(content)):
            content[:size] = self._buffer[:size]
            del self._buffer[:size]
            return size
        try:
            size = self._socket.recv_into(content)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionEnded(f"ended the connection ({error.strerror})") from error
        if not size:
            raise ConnectionEnded("ended the connection")
        return size

    def shut(self) -> None:
        """End the connection, for both sides; a thread that waits in it sees that. From any thread."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _decoded(self) -> ControlMessage | None:
        if len(self._buffer) < 4:
            return None
        size = int.from_bytes(self._buffer[:4], "big")
        if size > MAX_MESSAGE_BYTES:
            raise ConnectionEnded(f"sent a message of {size} bytes")
        if len(self._buffer) < 4 + size:
            return None
        body = bytes(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        try:
            return _DECODER.decode(body)
        except msgspec.MsgspecError as error:
            raise ConnectionEnded(f"sent what is no message: {error}") from error


def ready(channel: Channel, events: int, timeout_s: float) -> bool:
    """Wait until something can be read or written; False where it cannot in time."""
    poll = select.poll()
    poll.register(channel.fileno(), events)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
