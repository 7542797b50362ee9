"""The orchestrator's socket: a ZeroMQ ROUTER, as a rule in a folder that only its owner can enter.

Envelopes of the slots in the frames of `ductile.transport.frames`. One that cannot be read is dropped and counted; it
never stops the others. Long messages are encoded and decoded in a thread, so that the event loop goes on meanwhile; the
order of what goes to a slot, and of what comes, stays.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable

import zmq

from ductile.concurrency.background import start_reported
from ductile.messages.workers import Envelope, Hello
from ductile.roles import SlotLost
from ductile.transport.codec import LONG_FRAME_BYTES, BadFrame, decode
from ductile.transport.curve import RunKey
from ductile.transport.frames import FrameRouter
from ductile.transport.parcel import Parcel


class Router:
    """A `Transport` (`ductile.transport.mailbox`). Made inside a running event loop; `close` ends it."""

    def __init__(
        self,
        token: bytes,
        address: str,
        on_error: Callable[[str, Exception], None] = lambda sentence, error: None,
        key: RunKey | None = None,
    ) -> None:
        """address, key: as `FrameRouter` has them. on_error: told with a sentence when the orchestrator does not hear
        the slots any more."""
        self._frames = FrameRouter(token, address, key)
        self.address, self.dropped = self._frames.address, self._frames.dropped
        self._connections: dict[int, bytes] = {}
        self._posting: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Held for each slot by the one that encodes and sends: a short command must not overtake a long one."""
        self._receiving: asyncio.Task[None] | None = None
        self._deliver: Callable[[int, Envelope], None] = lambda slot, envelope: None
        self._on_error = on_error

    def listen(self, deliver: Callable[[int, Envelope], None]) -> None:
        self._deliver = deliver
        if self._receiving is None:
            self._receiving = start_reported(self._receive(), "the slots cannot be heard any more", self._on_error)

    async def post(self, slot: int, epoch: int, sequence: int, parcel: Parcel) -> None:
        connection = self._connections.get(slot)
        if connection is None:
            raise SlotLost(f"slot {slot} has not said Hello")
        async with self._posting[slot]:
            frame = await parcel.frame(epoch, sequence)
            try:
                await self._frames.send(connection, frame)
            except zmq.ZMQError as error:
                raise SlotLost(f"slot {slot} is not connected any more ({error})") from error

    async def close(self) -> None:
        if self._receiving:
            self._receiving.cancel()
            await asyncio.wait([self._receiving], timeout=1.0)
        self._frames.close()

    async def _receive(self) -> None:
        while True:
            connection, slot, payload = await self._frames.receive()
            try:
                long = len(payload) > LONG_FRAME_BYTES
                envelope = await asyncio.to_thread(decode, payload) if long else decode(payload)
            except BadFrame:
                self.dropped["unreadable"] += 1
                continue
            if isinstance(envelope.body, Hello):
                self._connections[slot] = connection
            if self._connections.get(slot) == connection:
                self._deliver(slot, envelope)
            else:
                self.dropped["no Hello"] += 1
