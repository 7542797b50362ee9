"""Requests and aborts on their way to the slots: what is sent in one turn of the event loop goes in one message a slot.

Aborts go before requests. A command from a task that is made later reaches the slot after what is sent here.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ductile.roles import Late, Refused, SlotLost
from ductile.wire.in_flight import InFlight
from ductile.wire.mailbox import Mailbox
from ductile.wire.messages import Abort, Generate

T = TypeVar("T")


class Dispatch:
    def __init__(self, mailbox: Mailbox, timeout_s: float) -> None:
        self._mailbox, self._timeout_s = mailbox, timeout_s
        self._outgoing: list[InFlight] = []
        self._aborting: list[tuple[int, str]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def send(self, entry: InFlight) -> None:
        """Send a request to the slot that it is at when the event loop turns. If that fails, the request fails."""
        self._outgoing.append(entry)
        self._send_soon()

    def abort(self, entry: InFlight) -> None:
        """Abort a request that its caller does not wait for any more."""
        if entry in self._outgoing:
            self._outgoing.remove(entry)
        elif entry.slot is not None:
            self._aborting.append((entry.slot, entry.name))
            self._send_soon()

    def start(self, telling: "Coroutine[Any, Any, T]") -> "asyncio.Task[T]":
        """Start a task that goes on when its caller is cancelled."""
        task = asyncio.create_task(telling)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _send_soon(self) -> None:
        if len(self._outgoing) + len(self._aborting) == 1:
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        aborting, self._aborting = self._aborting, []
        for slot in sorted({slot for slot, _ in aborting}):
            self.start(self._tell_abort(slot, [name for where, name in aborting if where == slot]))
        for slot in sorted({entry.slot for entry in outgoing if entry.slot is not None}):
            self.start(self._tell_generate(slot, [entry for entry in outgoing if entry.slot == slot]))

    async def _tell_abort(self, slot: int, names: list[str]) -> None:
        with suppress(SlotLost, Late, Refused):  # these requests are not waited for any more
            await self._mailbox.ask(slot, Abort(tuple(names)), self._timeout_s)

    async def _tell_generate(self, slot: int, requests: Sequence[InFlight]) -> None:
        try:
            await self._mailbox.ask(slot, Generate(tuple(entry.on_wire for entry in requests)), self._timeout_s)
        except (SlotLost, Late, Refused) as error:
            for entry in requests:
                if entry.slot == slot:
                    entry.fail(error)
