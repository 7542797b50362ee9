"""The same slots behind both transports: in memory, and as threads with real sockets."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import zmq

from ductile.messages.workers import Command, Envelope, Event, Hello
from ductile.transport.codec import encode
from ductile.transport.dealer import Dealer
from ductile.transport.mailbox import Mailbox
from ductile.transport.router import Router
from tests.transport.memory_transport import MemoryTransport, Responder

TOKEN = b"the run's token, 32 bytes of it."
ON_LOOPBACK = "tcp://127.0.0.1:*"


async def eventually(condition: Callable[[], bool], deadline_s: float = 90.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110  (the conditions belong to others, who set no event for us)
            await asyncio.sleep(0.005)


class SocketSlot:
    """A thread that replies as a slot's process would."""

    def __init__(self, slot: int, address: str, respond: Responder, token: bytes = TOKEN) -> None:
        self.slot, self._address, self._respond, self._token = slot, address, respond, token
        self._outbox: list[Event] = []
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        self._outbox.append(event)

    def stop(self) -> None:
        self._leave.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        dealer = Dealer(self._address, self._token, self.slot)
        dealer.send(encode(Envelope(0, 0, Hello(pid=1, device="cpu"))))
        poller = zmq.Poller()
        poller.register(dealer.socket, zmq.POLLIN)
        while not self._leave.is_set():
            while self._outbox:
                dealer.send(encode(Envelope(0, 0, self._outbox.pop(0))))
            if not poller.poll(10):
                continue
            envelope = dealer.receive()
            assert envelope is not None
            assert isinstance(envelope.body, Command)
            reply = self._respond(self.slot, envelope.body)
            assert not asyncio.iscoroutine(reply)
            if reply is not None:
                dealer.send(encode(Envelope(envelope.epoch, envelope.seq, reply)))
        dealer.close(0.1)


@asynccontextmanager
async def memory_slots(responders: Mapping[int, Responder]) -> AsyncIterator[tuple[Mailbox, dict]]:
    carrier = MemoryTransport(responders)
    mailbox = Mailbox(carrier)
    yield mailbox, {slot: lambda event, slot=slot: carrier.emit(slot, event) for slot in responders}


@asynccontextmanager
async def socket_slots(responders: Mapping[int, Responder]) -> AsyncIterator[tuple[Mailbox, dict]]:
    router = Router(TOKEN, ON_LOOPBACK)
    mailbox = Mailbox(router)
    slots = [SocketSlot(slot, router.address, respond) for slot, respond in responders.items()]
    try:
        await eventually(lambda: set(mailbox.heard_at_s) == set(responders))
        yield mailbox, {slot.slot: slot.emit for slot in slots}
    finally:
        with contextlib.ExitStack() as stack:
            for slot in slots:
                stack.callback(slot.stop)
        await router.close()
