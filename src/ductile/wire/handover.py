"""Unfinished requests leave their generators with the tokens that they have, and go on at others.

    HandOff   to each source            it forgets them and answers with their tokens; caches that go along stay there
    Generate  to each target            with the notes where the caches lie
    Forget    to each source            once the targets have taken them

Requests keep their names, and the caller of `generate` notices nothing. One that ends in the meantime is simply
finished; one that is aborted on the way goes to no generator. When a target does not take what it was to take, another
generator does, the source last; when there is none, the request fails with what the target said. Each handoff has one
outcome.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ductile.core.cluster.orders import Handoff
from ductile.core.cluster.routing import route
from ductile.records import CacheNote
from ductile.roles import Late, Refused, SlotLost
from ductile.wire.dispatch import Dispatch
from ductile.wire.in_flight import InFlight, RequestsInFlight
from ductile.wire.lending import FAILURES
from ductile.wire.mailbox import Mailbox
from ductile.wire.messages import Forget, Generate, HandedOff, HandOff
from ductile.wire.worker_pool import WorkerPool


@dataclass(frozen=True, slots=True)
class HandoffResult:
    """What became of one handoff."""

    order: Handoff
    slot: int | None
    """Slot where the request goes on; None: nowhere, it has ended or failed."""
    with_cache: bool = False
    why: str = ""
    """Why the handoff is not as it was ordered: "it had ended", "slot 3 refused it". "" when it is."""


@dataclass(slots=True, eq=False)
class _Traveller:
    order: Handoff
    entry: InFlight
    target: int
    cache: CacheNote | None
    tried: set[int] = field(default_factory=set[int])
    why: str = ""


class Handover:
    """Carries one set of handoffs out, once: `await Handover(...).run(orders)`."""

    def __init__(
        self,
        mailbox: Mailbox,
        pool: WorkerPool,
        requests: RequestsInFlight,
        dispatch: Dispatch,
        block_tokens: int,
        timeout_s: float,
    ) -> None:
        """block_tokens: as `core.cluster.routing.route` has it."""
        self._mailbox, self._pool, self._in_flight, self._dispatch = mailbox, pool, requests, dispatch
        self._block_tokens, self._timeout_s = block_tokens, timeout_s
        self._results: dict[str, HandoffResult] = {}
        self._kept: dict[int, list[str]] = {}
        """Names of the requests whose KV caches a source keeps for other slots, by source."""

    async def run(self, orders: Sequence[Handoff]) -> tuple[HandoffResult, ...]:
        by_source: dict[int, list[tuple[Handoff, InFlight]]] = {}
        for order in orders:
            entry = self._in_flight.get(order.id)
            if entry is None or entry.slot != order.source or entry.completion.done():
                self._note_absent(order, entry)
            else:
                by_source.setdefault(order.source, []).append((order, entry))
        left = await asyncio.gather(*(self._leave(source, leaving) for source, leaving in by_source.items()))
        await self._arrive([traveller for travellers in left for traveller in travellers])
        await asyncio.gather(*(self._forget(source, names) for source, names in self._kept.items()))
        return tuple(self._results[order.id] for order in orders)

    async def _leave(self, source: int, leaving: Sequence[tuple[Handoff, InFlight]]) -> list[_Traveller]:
        """Take requests away from their source. Returns those that are now between two generators."""
        names = tuple(entry.name for _, entry in leaving)
        with_cache = tuple(order.id for order, _ in leaving if order.with_cache)
        try:
            reply = await self._mailbox.ask(source, HandOff(names, with_cache), self._timeout_s)
            if not isinstance(reply, HandedOff):
                raise Refused(f"{self._mailbox.describe(source)} answered HandOff with {type(reply).__name__}")
        except FAILURES as error:
            for order, entry in leaving:
                self._note_not_left(order, entry, error)
            return []
        if reply.caches:
            self._kept[source] = list(reply.caches)
        requests = {request.id: request for request in reply.requests}
        travellers: list[_Traveller] = []
        for order, entry in leaving:
            request = requests.get(entry.name)
            here = self._in_flight.is_under_way(entry) and entry.slot == source
            if here and request is not None:
                entry.take(request)
                self._in_flight.note_slot(entry, None)
                travellers.append(_Traveller(order, entry, order.target, reply.caches.get(entry.name)))
            else:
                if here:
                    entry.fail(Refused(f"{self._mailbox.describe(source)} does not know {entry.name}, which it had"))
                self._note_absent(order, None)
        return travellers

    async def _arrive(self, travellers: Sequence[_Traveller]) -> None:
        while travellers:
            by_target: dict[int, list[_Traveller]] = {}
            for traveller in travellers:
                by_target.setdefault(traveller.target, []).append(traveller)
            refused = await asyncio.gather(*(self._land(target, group) for target, group in by_target.items()))
            travellers = [traveller for group in refused for traveller in group]

    async def _land(self, target: int, travellers: Sequence[_Traveller]) -> list[_Traveller]:
        """Bring requests to a target. Returns those that go to another generator now."""
        aboard = [traveller for traveller in travellers if self._is_still_wanted(traveller)]
        if not aboard:
            return []
        for traveller in aboard:
            traveller.tried.add(target)
        try:
            await self._bring(target, aboard)
        except FAILURES as error:
            return [traveller for traveller in aboard if self._turns_to_another(traveller, target, error)]
        for traveller in aboard:
            if traveller.entry.slot == target:
                self._in_flight.note_slot(traveller.entry, target)  # its generator's time runs from now on
            self._note(traveller.order, target, traveller.cache is not None, traveller.why)
        return []

    async def _bring(self, target: int, travellers: Sequence[_Traveller]) -> None:
        if target not in self._pool.serving:
            raise Refused(f"slot {target} takes no requests")
        requests = [traveller.entry for traveller in travellers]
        caches = {traveller.entry.name: traveller.cache for traveller in travellers if traveller.cache is not None}
        for entry in requests:
            self._in_flight.note_slot(entry, target)
            entry.migrating = True
        try:
            generate = Generate(tuple(entry.on_wire for entry in requests), caches)
            await self._mailbox.ask(target, generate, self._timeout_s)
        finally:
            for entry in requests:
                entry.migrating = False
        if target in self._mailbox.lost:  # just after it had said that it takes them
            raise SlotLost(self._mailbox.lost[target])

    def _turns_to_another(self, traveller: _Traveller, target: int, error: Exception) -> bool:
        if not self._is_still_wanted(traveller):
            return False
        entry = traveller.entry
        if isinstance(error, Late) and entry.slot == target:
            self._dispatch.abort(entry)  # it may have taken it
        traveller.why = traveller.why or str(error)
        # Who gave it away can take it again, though it was about to leave: then it leaves later.
        others = [slot for slot in self._pool.slots if slot not in traveller.tried] or [
            slot for slot in self._pool.serving if slot == traveller.order.source and slot not in traveller.tried
        ]
        if not others:
            entry.fail(error)
            self._note(traveller.order, None, why=traveller.why)
            return False
        self._in_flight.note_slot(entry, None)
        request = entry.request
        loads = self._in_flight.loads(others)
        traveller.target = route(request.group, loads, len(request.prompt), self._block_tokens).slot
        return True

    def _is_still_wanted(self, traveller: _Traveller) -> bool:
        if self._in_flight.is_under_way(traveller.entry):
            return True
        self._note_absent(traveller.order, None)
        return False

    async def _forget(self, source: int, names: Sequence[str]) -> None:
        with suppress(*FAILURES):  # what a lost slot kept is gone with it
            await self._mailbox.ask(source, Forget(tuple(names)), self._timeout_s)

    def _note_not_left(self, order: Handoff, entry: InFlight, error: Exception) -> None:
        """A slot that refuses has given nothing away. One that is late may have, into nowhere."""
        if isinstance(error, Refused) and self._in_flight.is_under_way(entry):
            self._note(order, order.source, why=str(error))
            return
        if entry.slot == order.source:
            entry.fail(error)
        self._note(order, None, why=str(error))

    def _note_absent(self, order: Handoff, entry: InFlight | None) -> None:
        if entry is None or entry.completion.done():
            self._note(order, None, why="it had ended")
        else:
            where = "at no generator" if entry.slot is None else f"at slot {entry.slot}"
            self._note(order, entry.slot, why=f"it was {where}, and not at slot {order.source}")

    def _note(self, order: Handoff, slot: int | None, with_cache: bool = False, why: str = "") -> None:
        self._results[order.id] = HandoffResult(order, slot, with_cache, why)
