"""Bytes between the orchestrator and many processes that have numbers, with the run's token before them.

Each message to the orchestrator has four frames,

    [ ZeroMQ's name of the connection | the run's token | number of the sender | payload ]

and each from it three: the second and third of these fall together, since the connection says who it is for. A message
without the right token is dropped and counted; it never stops the others.
"""

import asyncio
import hmac
from collections import Counter
from typing import Any

import zmq
import zmq.asyncio

from ductile.transport.codec import MAX_FRAME_BYTES


class FrameRouter:
    """The orchestrator's socket. Made inside a running event loop; `close` ends it."""

    def __init__(self, token: bytes, address: str) -> None:
        """address: as ZeroMQ has it, such as `ductile.transport.sockets` has, or with "*" for a free port."""
        self.dropped: Counter[str] = Counter()
        """Number of messages that were not let in, by reason."""
        self._token = token
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        _set_limits(self._socket)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receive(self) -> tuple[bytes, int, bytes]:
        """The next message: connection, number of the sender, payload."""
        while True:
            await asyncio.sleep(0)  # other tasks have a turn between two messages, however many wait here
            frames = await self._socket.recv_multipart()
            if len(frames) != 4:
                self.dropped["wrong number of frames"] += 1
            elif not hmac.compare_digest(frames[1], self._token):
                self.dropped["unknown token"] += 1
            elif not (frames[2].isdigit() and len(frames[2]) < 10):
                self.dropped["unreadable"] += 1
            else:
                return frames[0], int(frames[2]), frames[3]

    async def send(self, connection: bytes, payload: bytes) -> None:
        """Raises `zmq.ZMQError` when the connection is gone."""
        await self._socket.send_multipart([connection, self._token, payload])  # pyright: ignore[reportUnknownMemberType]

    def close(self) -> None:
        self._context.destroy(linger=0)


class FrameDealer:
    """The socket of another process, in its event loop."""

    def __init__(self, address: str, token: bytes, number: int) -> None:
        self._token, self._prefix = token, [token, str(number).encode()]
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        connect(self._socket, address)

    async def send(self, payload: bytes) -> None:
        # pyzmq's stub leaves open what a sequence of parts is made of.
        await self._socket.send_multipart([*self._prefix, payload])  # pyright: ignore[reportUnknownMemberType]

    async def receive(self) -> bytes:
        """The payload of the next message that carries the token."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) == 2 and hmac.compare_digest(frames[0], self._token):
                return frames[1]

    def close(self, linger_s: float = 1.0) -> None:
        """Close the socket; messages that were sent have `linger_s` seconds to leave."""
        self._context.destroy(linger=int(linger_s * 1000))


def connect(socket: "zmq.Socket[Any]", address: str) -> None:
    """Connect the socket of another process to the orchestrator's."""
    _set_limits(socket)
    socket.connect(address)


def _set_limits(socket: "zmq.Socket[Any]") -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    # No high-water mark: at the mark a send waits, and one stopped process would hold up what is for all others.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
