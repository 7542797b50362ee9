"""Bytes between the orchestrator and many processes that have numbers, with the run's token before them.

Each message to the orchestrator has four frames,

    [ ZeroMQ's name of the connection | the run's token | number of the sender | payload ]

and each from it three: the second and third of these fall together, since the connection says who it is for. A message
without the right token is dropped and counted; it never stops the others. Between machines all of it is encrypted, and
who has not the run's key is not let in (`ductile.transport.curve`).
"""

import asyncio
import hmac
import secrets
from collections import Counter
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from ductile.transport.codec import MAX_FRAME_BYTES
from ductile.transport.curve import DOOR, Doorkeeper, RunKey


class FrameRouter:
    """The orchestrator's socket. Made inside a running event loop; `close` ends it."""

    def __init__(self, token: bytes, address: str, key: RunKey | None = None) -> None:
        """address: as ZeroMQ has it, such as `ductile.transport.sockets` has, or with "*" for a free port. key: without
        one, nothing is encrypted. Raises `zmq.ZMQError` where the address cannot be had."""
        self.dropped: Counter[str] = Counter()
        """Number of messages that were not let in, by reason."""
        self._token = token
        self._context = zmq.asyncio.Context()
        self._watching_door: asyncio.Task[None] | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A process whose connection broke comes back under the name that it had.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        _set_limits(self._socket)
        if key is not None:
            door = self._context.socket(zmq.REP)
            door.bind(DOOR)
            key.guard(self._socket)
            self._watching_door = asyncio.create_task(self._watch_door(door, Doorkeeper(key)))
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise
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

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; messages that were sent have `linger_s` seconds to leave."""
        if self._watching_door:
            self._watching_door.cancel()
        self._context.destroy(linger=int(linger_s * 1000))

    async def _watch_door(self, door: "zmq.asyncio.Socket", doorkeeper: Doorkeeper) -> None:
        while True:
            frames = await door.recv_multipart()
            reply = doorkeeper.reply(frames)
            if doorkeeper.num_refused:
                self.dropped["unknown key"] = doorkeeper.num_refused
            await door.send_multipart(reply)  # pyright: ignore[reportUnknownMemberType]


class FrameDealer:
    """The socket of another process, in its event loop."""

    def __init__(self, address: str, token: bytes, number: int, key: RunKey | None = None) -> None:
        self._token, self._prefix = token, [token, str(number).encode()]
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"d" + secrets.token_bytes(16))  # it stays when the connection breaks
        self._events = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.was_connected = False
        connect(self._socket, address, key)

    async def send(self, payload: bytes) -> None:
        # pyzmq's stub leaves open what a sequence of parts is made of.
        await self._socket.send_multipart([*self._prefix, payload])  # pyright: ignore[reportUnknownMemberType]

    async def receive(self) -> bytes:
        """The payload of the next message that carries the token."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) == 2 and hmac.compare_digest(frames[0], self._token):
                return frames[1]

    async def broken(self, grace_s: float) -> None:
        """Wait until a connection that stood has been broken for `grace_s`: the other process has ended, or a machine.
        A network that only keeps silent breaks none."""
        is_up = False
        while True:
            limit_s = grace_s if self.was_connected and not is_up else None
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    event = await recv_monitor_message(self._events)
                    is_up = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
                    self.was_connected |= is_up
                    continue
            return

    def close(self, linger_s: float = 1.0) -> None:
        """Close the socket; messages that were sent have `linger_s` seconds to leave."""
        self._context.destroy(linger=int(linger_s * 1000))


def connect(socket: "zmq.Socket[Any]", address: str, key: RunKey | None = None) -> None:
    """Connect the socket of another process to the orchestrator's."""
    _set_limits(socket)
    if key is not None:
        key.enter(socket)
    socket.connect(address)


def _set_limits(socket: "zmq.Socket[Any]") -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    # No high-water mark: at the mark a send waits, and one stopped process would hold up what is for all others.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
