"""Requests and aborts on their way to the generators: what is sent in one turn of the event loop goes in one message to
each.

Aborts go before requests. A command from a task that is made later reaches the generator after what is sent here.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from ductile.concurrency.background import start
from ductile.core.instances.instances import Instance, in_order
from ductile.fleet.requests.in_flight import InFlight
from ductile.fleet.requests.worker_pool import WorkerPool
from ductile.messages.workers import Abort, Generate
from ductile.roles import Failure, Late


class Dispatch:
    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._outgoing: list[InFlight] = []
        self._aborting: list[tuple[Instance, str]] = []

    def send(self, entry: InFlight) -> None:
        """Send a request to the generator that it is at when the event loop turns. If that fails, the request fails."""
        self._outgoing.append(entry)
        self._send_soon()

    def abort(self, entry: InFlight) -> None:
        """Abort a request that its caller does not wait for any more."""
        if entry in self._outgoing:
            self._outgoing.remove(entry)
        elif entry.instance is not None:
            self._aborting.append((entry.instance, entry.name))
            self._send_soon()

    def _send_soon(self) -> None:
        if len(self._outgoing) + len(self._aborting) == 1:
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        aborting, self._aborting = self._aborting, []
        for instance in in_order({instance for instance, _ in aborting}):
            start(self._tell_abort(instance, [name for where, name in aborting if where == instance]))
        for instance in in_order({entry.instance for entry in outgoing if entry.instance is not None}):
            start(self._tell_generate(instance, [entry for entry in outgoing if entry.instance == instance]))

    async def _tell_abort(self, instance: Instance, names: list[str]) -> None:
        with suppress(Failure):  # these requests are not waited for any more
            await self._pool.ask(instance, Abort(tuple(names)))

    async def _tell_generate(self, instance: Instance, requests: Sequence[InFlight]) -> None:
        try:
            await self._pool.ask(instance, Generate(tuple(entry.on_wire for entry in requests)))
        except Late as error:  # it hangs, and is lost: these requests begin again as those of any other that is
            try:
                self._pool.leave_behind({instance: error})
            except Failure as failure:
                self._fail(instance, requests, failure)
        except Exception as error:  # a message that cannot be sent, too: else these requests wait, and nobody hears why
            self._fail(instance, requests, error)

    def _fail(self, instance: Instance, requests: Sequence[InFlight], error: Exception) -> None:
        for entry in requests:
            if entry.instance == instance:
                entry.fail(error)
