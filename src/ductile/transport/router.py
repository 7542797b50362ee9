"""The orchestrator's socket: a ZeroMQ ROUTER, as a rule in a folder that only its owner can enter.

Each message has four frames, from a slot:

    [ ZeroMQ's name of the connection | the run's token | slot number | envelope ]

and three frames to a slot: the second and third of these fall together, since the connection says which slot it is.
A message without the right token, or one that cannot be read, is dropped and counted; it never stops the others.
Long messages are encoded and decoded in a thread, so that the event loop goes on meanwhile; the order of what goes to a
slot, and of what comes, stays.
"""

import asyncio
import hmac
from collections import Counter, defaultdict
from collections.abc import Callable

import zmq
import zmq.asyncio

from ductile.concurrency.background import start_reported
from ductile.messages.workers import Envelope, Hello
from ductile.roles import SlotLost
from ductile.transport.codec import LONG_FRAME_BYTES, MAX_FRAME_BYTES, BadFrame, decode, encode, is_long


class Router:
    """A `Transport` (`ductile.transport.mailbox`). Made inside a running event loop; `close` ends it."""

    def __init__(
        self,
        token: bytes,
        address: str,
        on_error: Callable[[str, Exception], None] = lambda sentence, error: None,
    ) -> None:
        """address: as ZeroMQ has it, such as `ductile.transport.sockets` has, or with "*" for a free port. on_error:
        told with a sentence when the orchestrator does not hear the slots any more."""
        self.dropped: Counter[str] = Counter()
        """Number of messages that were not let in, by reason."""
        self._token = token
        self._connections: dict[int, bytes] = {}
        self._posting: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Held for each slot by the one that encodes and sends: a short command must not overtake a long one."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        # No high-water mark: at the mark a send waits, and one stopped slot would hold up the commands to all others.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._receiving: asyncio.Task[None] | None = None
        self._on_error = on_error

    def listen(self, deliver: Callable[[int, Envelope], None]) -> None:
        self._receiving = start_reported(self._receive(deliver), "the slots cannot be heard any more", self._on_error)

    async def post(self, slot: int, envelope: Envelope) -> None:
        connection = self._connections.get(slot)
        if connection is None:
            raise SlotLost(f"slot {slot} has not said Hello")
        async with self._posting[slot]:
            frame = await asyncio.to_thread(encode, envelope) if is_long(envelope.body) else encode(envelope)
            try:
                await self._socket.send_multipart([connection, self._token, frame])
            except zmq.ZMQError as error:
                raise SlotLost(f"slot {slot} is not connected any more ({error})") from error

    async def close(self) -> None:
        if self._receiving:
            self._receiving.cancel()
            await asyncio.wait([self._receiving], timeout=1.0)
        self._context.destroy(linger=0)

    async def _receive(self, deliver: Callable[[int, Envelope], None]) -> None:
        while True:
            await asyncio.sleep(0)  # other tasks have a turn between two messages, however many wait here
            frames = await self._socket.recv_multipart()
            if len(frames) != 4:
                self.dropped["wrong number of frames"] += 1
                continue
            connection, token, name, payload = frames
            if not hmac.compare_digest(token, self._token):
                self.dropped["unknown token"] += 1
                continue
            try:
                long = len(payload) > LONG_FRAME_BYTES
                slot, envelope = int(name), await asyncio.to_thread(decode, payload) if long else decode(payload)
            except (BadFrame, ValueError):
                self.dropped["unreadable"] += 1
                continue
            if isinstance(envelope.body, Hello):
                self._connections[slot] = connection
            if self._connections.get(slot) == connection:
                deliver(slot, envelope)
            else:
                self.dropped["no Hello"] += 1
