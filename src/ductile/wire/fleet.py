"""The generators behind one call: `generate` sends a sequence where there is room and waits until it comes back.

What is sent in one turn of the event loop goes to a slot in one message, aborts before new requests. A second attempt
after an abort has a name of its own on the wire, so that the first one's late answer is never taken for its.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ductile.core.cluster.routing import GeneratorLoad, predicted_tokens, route
from ductile.records import GenerateRequest, Generation, Manifest
from ductile.roles import Late, Refused, SlotLost
from ductile.wire.mailbox import Mailbox
from ductile.wire.messages import Abort, Died, EngineStats, Event, Finished, Generate
from ductile.wire.remote import receive


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """One sequence under way."""

    name: str
    slot: int
    request: GenerateRequest
    predicted_tokens: float
    arrival: "asyncio.Future[Generation]"


class RemoteGenerators:
    """Follows `ductile.roles.Generators`."""

    def __init__(
        self,
        mailbox: Mailbox,
        slots: Sequence[int],
        max_num_seqs: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_num_seqs: of one generator. timeout_s: without any progress of a slot, its sequences are `Late`."""
        self._mailbox, self._slots, self._timeout_s, self._clock = mailbox, tuple(slots), timeout_s, clock
        self._max_num_seqs = max_num_seqs
        self._flights: dict[str, _Flight] = {}
        self._num_aborted: Counter[str] = Counter()
        """By request."""
        self._outgoing: list[_Flight] = []
        self._aborting: list[_Flight] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._num_tokens = dict.fromkeys(self._slots, 0)
        """Sampled by each slot, as it said last."""
        self._progress_at_s = dict.fromkeys(self._slots, clock())
        self._num_finished = self._finished_tokens = 0
        mailbox.subscribe(self._on_event)

    @property
    def capacity(self) -> int:
        return self._max_num_seqs * len(self._slots)

    async def generate(self, request: GenerateRequest) -> Generation:
        flight = self._take_off(request)
        try:
            generation = await self._landing(flight)
        except asyncio.CancelledError:
            self._abort(flight)
            raise
        finally:
            del self._flights[flight.name]
        self._num_finished += 1
        self._finished_tokens += len(generation.token_ids)
        return replace(generation, id=request.id)

    async def receive(self, manifest: Manifest) -> None:
        await receive(self._mailbox, self._slots, "generate", manifest, self._timeout_s)

    def loads(self) -> list[GeneratorLoad]:
        """What each slot still has to do, as far as one can know."""
        remaining = dict.fromkeys(self._slots, 0.0)
        groups: dict[int, set[str]] = {slot: set() for slot in self._slots}
        for flight in self._flights.values():
            remaining[flight.slot] += flight.predicted_tokens
            if flight.request.group:
                groups[flight.slot].add(flight.request.group)
        return [GeneratorLoad(slot, remaining[slot], frozenset(groups[slot])) for slot in self._slots]

    def _take_off(self, request: GenerateRequest) -> _Flight:
        slot = route(request.group, self.loads()).slot
        if not any(flight.slot == slot for flight in self._flights.values()):
            self._progress_at_s[slot] = self._clock()  # it was idle: no progress was due
        mean_length = self._finished_tokens / self._num_finished if self._num_finished else None
        flight = _Flight(
            # A first attempt keeps its name: a generator's random stream may follow from it.
            name=f"{request.id}~{aborted}" if (aborted := self._num_aborted[request.id]) else request.id,
            slot=slot,
            request=request,
            predicted_tokens=predicted_tokens(request.sampling.max_tokens, len(request.generated), mean_length),
            arrival=asyncio.get_running_loop().create_future(),
        )
        self._flights[flight.name] = flight
        self._outgoing.append(flight)
        self._send_soon()
        return flight

    async def _landing(self, flight: _Flight) -> Generation:
        while not flight.arrival.done():
            patience_s = self._progress_at_s[flight.slot] + self._timeout_s - self._clock()
            if patience_s <= 0:
                raise Late(
                    f"{self._mailbox.describe(flight.slot)} made no progress for {self._timeout_s:g} s while it had "
                    f"to generate {flight.request.id}"
                )
            await asyncio.wait([flight.arrival], timeout=patience_s)
        return flight.arrival.result()

    def _abort(self, flight: _Flight) -> None:
        self._num_aborted[flight.request.id] += 1
        self._aborting.append(flight)
        self._send_soon()

    def _send_soon(self) -> None:
        if len(self._outgoing) + len(self._aborting) == 1:
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        for slot in self._slots:
            aborts = [flight.name for flight in self._aborting if flight.slot == slot]
            flights = [flight for flight in self._outgoing if flight.slot == slot]
            if aborts:
                self._start(self._tell_abort(slot, aborts))
            if flights:
                self._start(self._tell_generate(slot, flights))
        self._outgoing.clear()
        self._aborting.clear()

    def _start(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(telling)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _tell_abort(self, slot: int, names: list[str]) -> None:
        with suppress(SlotLost, Late, Refused):  # nobody waits for these sequences any more
            await self._mailbox.ask(slot, Abort(tuple(names)), self._timeout_s)

    async def _tell_generate(self, slot: int, flights: list[_Flight]) -> None:
        try:
            requests = tuple(replace(flight.request, id=flight.name) for flight in flights)
            await self._mailbox.ask(slot, Generate(requests), self._timeout_s)
        except (SlotLost, Late, Refused) as error:
            _fail(flights, error)

    def _on_event(self, slot: int, event: Event) -> None:
        match event:
            case Finished(generations):
                self._progress_at_s[slot] = self._clock()
                for generation in generations:
                    flight = self._flights.get(generation.id)
                    if flight and not flight.arrival.done():
                        flight.arrival.set_result(generation)
            case EngineStats(num_tokens=num_tokens) if num_tokens != self._num_tokens.get(slot):
                self._progress_at_s[slot] = self._clock()
                self._num_tokens[slot] = num_tokens
            case Died(reason):
                _fail([flight for flight in self._flights.values() if flight.slot == slot], SlotLost(reason))
            case _:
                pass


def _fail(flights: Sequence[_Flight], error: Exception) -> None:
    for flight in flights:
        if not flight.arrival.done():
            flight.arrival.set_exception(error)
