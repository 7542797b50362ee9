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
from ductile.records import KVHandle
from ductile.roles import Late, Refused, SlotLost
from ductile.wire.dispatch import Dispatch
from ductile.wire.flights import Flights, InFlight
from ductile.wire.leases import FAILURES
from ductile.wire.mailbox import Mailbox
from ductile.wire.messages import Forget, Generate, HandedOff, HandOff
from ductile.wire.roster import Roster


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
    flight: InFlight
    target: int
    cache: KVHandle | None
    tried: set[int] = field(default_factory=set[int])
    why: str = ""


class Handover:
    """Carries one set of handoffs out, once: `await Handover(...).run(orders)`."""

    def __init__(
        self,
        mailbox: Mailbox,
        roster: Roster,
        flights: Flights,
        dispatch: Dispatch,
        block_tokens: int,
        timeout_s: float,
    ) -> None:
        """block_tokens: as `core.cluster.routing.route` has it."""
        self._mailbox, self._roster, self._flights, self._dispatch = mailbox, roster, flights, dispatch
        self._block_tokens, self._timeout_s = block_tokens, timeout_s
        self._results: dict[str, HandoffResult] = {}
        self._kept: dict[int, list[str]] = {}
        """Names of the requests whose KV caches a source keeps for other slots, by source."""

    async def run(self, orders: Sequence[Handoff]) -> tuple[HandoffResult, ...]:
        by_source: dict[int, list[tuple[Handoff, InFlight]]] = {}
        for order in orders:
            flight = self._flights.get(order.id)
            if flight is None or flight.slot != order.source or flight.arrival.done():
                self._note_absent(order, flight)
            else:
                by_source.setdefault(order.source, []).append((order, flight))
        left = await asyncio.gather(*(self._leave(source, leaving) for source, leaving in by_source.items()))
        await self._arrive([traveller for travellers in left for traveller in travellers])
        await asyncio.gather(*(self._forget(source, names) for source, names in self._kept.items()))
        return tuple(self._results[order.id] for order in orders)

    async def _leave(self, source: int, leaving: Sequence[tuple[Handoff, InFlight]]) -> list[_Traveller]:
        """Take requests away from their source. Returns those that are now between two generators."""
        names = tuple(flight.name for _, flight in leaving)
        with_cache = tuple(order.id for order, _ in leaving if order.with_cache)
        try:
            reply = await self._mailbox.ask(source, HandOff(names, with_cache), self._timeout_s)
            if not isinstance(reply, HandedOff):
                raise Refused(f"{self._mailbox.describe(source)} answered HandOff with {type(reply).__name__}")
        except FAILURES as error:
            for order, flight in leaving:
                self._note_not_left(order, flight, error)
            return []
        if reply.caches:
            self._kept[source] = list(reply.caches)
        requests = {request.id: request for request in reply.requests}
        travellers: list[_Traveller] = []
        for order, flight in leaving:
            request = requests.get(flight.name)
            here = self._flights.is_under_way(flight) and flight.slot == source
            if here and request is not None:
                flight.take(request)
                self._flights.board(flight, None)
                travellers.append(_Traveller(order, flight, order.target, reply.caches.get(flight.name)))
            else:
                if here:
                    flight.fail(Refused(f"{self._mailbox.describe(source)} does not know {flight.name}, which it had"))
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
            if traveller.flight.slot == target:
                self._flights.board(traveller.flight, target)  # its generator's time runs from now on
            self._note(traveller.order, target, traveller.cache is not None, traveller.why)
        return []

    async def _bring(self, target: int, travellers: Sequence[_Traveller]) -> None:
        if target not in self._roster.serving:
            raise Refused(f"slot {target} takes no requests")
        flights = [traveller.flight for traveller in travellers]
        caches = {traveller.flight.name: traveller.cache for traveller in travellers if traveller.cache is not None}
        for flight in flights:
            self._flights.board(flight, target)
            flight.landing = True
        try:
            generate = Generate(tuple(flight.on_wire for flight in flights), caches)
            await self._mailbox.ask(target, generate, self._timeout_s)
        finally:
            for flight in flights:
                flight.landing = False
        if target in self._mailbox.lost:  # just after it had said that it takes them
            raise SlotLost(self._mailbox.lost[target])

    def _turns_to_another(self, traveller: _Traveller, target: int, error: Exception) -> bool:
        if not self._is_still_wanted(traveller):
            return False
        flight = traveller.flight
        if isinstance(error, Late) and flight.slot == target:
            self._dispatch.abort(flight)  # it may have taken it
        traveller.why = traveller.why or str(error)
        # Who gave it away can take it again, though it was about to leave: then it leaves later.
        others = [slot for slot in self._roster.slots if slot not in traveller.tried] or [
            slot for slot in self._roster.serving if slot == traveller.order.source and slot not in traveller.tried
        ]
        if not others:
            flight.fail(error)
            self._note(traveller.order, None, why=traveller.why)
            return False
        self._flights.board(flight, None)
        request = flight.request
        loads = self._flights.loads(others)
        traveller.target = route(request.group, loads, len(request.prompt), self._block_tokens).slot
        return True

    def _is_still_wanted(self, traveller: _Traveller) -> bool:
        if self._flights.is_under_way(traveller.flight):
            return True
        self._note_absent(traveller.order, None)
        return False

    async def _forget(self, source: int, names: Sequence[str]) -> None:
        with suppress(*FAILURES):  # what a lost slot kept is gone with it
            await self._mailbox.ask(source, Forget(tuple(names)), self._timeout_s)

    def _note_not_left(self, order: Handoff, flight: InFlight, error: Exception) -> None:
        """A slot that refuses has given nothing away. One that is late may have, into nowhere."""
        if isinstance(error, Refused) and self._flights.is_under_way(flight):
            self._note(order, order.source, why=str(error))
            return
        if flight.slot == order.source:
            flight.fail(error)
        self._note(order, None, why=str(error))

    def _note_absent(self, order: Handoff, flight: InFlight | None) -> None:
        if flight is None or flight.arrival.done():
            self._note(order, None, why="it had ended")
        else:
            where = "at no generator" if flight.slot is None else f"at slot {flight.slot}"
            self._note(order, flight.slot, why=f"it was {where}, and not at slot {order.source}")

    def _note(self, order: Handoff, slot: int | None, with_cache: bool = False, why: str = "") -> None:
        self._results[order.id] = HandoffResult(order, slot, with_cache, why)
