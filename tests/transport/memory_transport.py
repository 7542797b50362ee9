"""A `Transport` inside one event loop, with the faults one asks for: the double of `router` and of the slots behind it.

    transport = MemoryTransport({0: respond, 1: respond})  # respond(slot, command) -> reply; None: no reply comes
    transport.fail(1, "delay", on=Score, delay_s=0.5)        # the next Score to slot 1 arrives half a second late
    mailbox = Mailbox(transport)

Everything passes through the codec, so what works here has the types that the wire has.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ductile.concurrency.listeners import Listeners
from ductile.messages.workers import Command, Envelope, Event, Failed, Reply
from ductile.roles import SlotLost
from ductile.transport.codec import decode, encode
from ductile.transport.parcel import Parcel

Responder = Callable[[int, Command], Reply | Awaitable[Reply | None] | None]
FaultKind = Literal["drop", "delay", "duplicate", "error", "death"]


@dataclass(slots=True)
class Fault:
    slot: int
    kind: FaultKind
    on: type | None
    delay_s: float
    times: int
    code: str

    def hits(self, slot: int, command: Command) -> bool:
        return self.times > 0 and self.slot == slot and (self.on is None or isinstance(command, self.on))


class MemoryTransport:
    def __init__(self, slots: Mapping[int, Responder]) -> None:
        self.sent: list[tuple[int, Command]] = []
        """Every command that was posted, in order."""
        self.on_death = Listeners[[int, str]]()
        """Told of slots that die: what a cluster does, which `Mailbox.lose` hears it from."""
        self._slots = dict(slots)
        self._faults: list[Fault] = []
        self._deliver: Callable[[int, Envelope], None] = lambda slot, envelope: None
        self._running: set[asyncio.Task[None]] = set()

    def listen(self, deliver: Callable[[int, Envelope], None]) -> None:
        self._deliver = deliver

    def fail(
        self,
        slot: int,
        kind: FaultKind,
        on: type | None = None,
        delay_s: float = 0.0,
        times: int = 1,
        code: str = "refused",
    ) -> None:
        """Have the next `times` commands (of class `on`) to `slot` go wrong.

        drop: it never arrives. delay: the reply is `delay_s` late. duplicate: it comes twice. error: it is
        `Failed` with this code. death: the slot is gone from then on.
        """
        self._faults.append(Fault(slot, kind, on, delay_s, times, code))

    def emit(self, slot: int, event: Event) -> None:
        """Have a slot say something unasked."""
        self._deliver(slot, decode(encode(Envelope(0, 0, event))))

    async def post(self, slot: int, epoch: int, sequence: int, parcel: Parcel) -> None:
        if slot not in self._slots:
            raise SlotLost(f"slot {slot} is not connected")
        envelope = decode(await parcel.frame(epoch, sequence))
        command = envelope.body
        assert isinstance(command, Command)
        self.sent.append((slot, command))
        task = asyncio.create_task(self._respond(slot, envelope, command, self._next_fault(slot, command)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _next_fault(self, slot: int, command: Command) -> Fault | None:
        fault = next((fault for fault in self._faults if fault.hits(slot, command)), None)
        if fault:
            fault.times -= 1
        return fault

    async def _respond(self, slot: int, envelope: Envelope, command: Command, fault: Fault | None) -> None:
        kind = fault.kind if fault else None
        if kind == "drop":
            return
        if slot not in self._slots:
            return  # it died on an earlier one
        if kind == "death":
            del self._slots[slot]
            self.on_death(slot, f"slot {slot} died, as asked")
            return
        if fault and kind == "delay":
            await asyncio.sleep(fault.delay_s)
        if kind == "error":
            reply = Failed(f"{type(command).__name__} failed, as asked", code=fault.code if fault else "")
        else:
            reply = self._slots[slot](slot, command)
            if isinstance(reply, Awaitable):
                reply = await reply
        if reply is None:
            return
        response = decode(encode(Envelope(envelope.epoch, envelope.seq, reply)))
        for _ in range(2 if kind == "duplicate" else 1):
            self._deliver(slot, response)
