"""The books of all requests in flight: where each is, how far it is, and how much work every generator still has."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ductile.core.cluster.routing import GeneratorLoad, predicted_tokens
from ductile.core.cluster.state import Unfinished
from ductile.records import GenerateRequest, Generation
from ductile.wire.answers import Answers
from ductile.wire.change_signal import ChangeSignal
from ductile.wire.messages import EngineStats


@dataclass(slots=True, eq=False)
class InFlight:
    """One request in flight."""

    name: str
    """Id of the request on the wire: its own, with a number after it once that id was aborted."""
    request: GenerateRequest
    """The request, with the tokens that it had when a generator last handed it off."""
    arrival: "asyncio.Future[Generation]"
    slot: int | None = None
    """Slot that has the request; None while it waits for a generator, or is between two."""
    since_s: float = 0.0
    """Time on the clock of `Flights` at which the request came to `slot`, in seconds."""
    generated: int = 0
    """Tokens of the completion, as its generator said last."""
    predicted_tokens: float = 0.0
    """Tokens that are still to come, as predicted."""
    num_lost: int = 0
    """Slots that were lost while they had the request."""

    landing: bool = False
    """A handoff brings the request to `slot` and waits for the reply. Should that slot be lost, the handoff goes on."""

    def take(self, request: GenerateRequest) -> None:
        """Take over what a generator handed off: the same request, with the tokens that it has so far."""
        self.request = replace(request, id=self.request.id)
        self.generated = len(request.generated)

    def fail(self, error: Exception) -> None:
        if not self.arrival.done():
            self.arrival.set_exception(error)

    @property
    def on_wire(self) -> GenerateRequest:
        return replace(self.request, id=self.name)


class Flights:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.answers = Answers()
        self._clock = clock
        self._by_name: dict[str, InFlight] = {}
        self._num_aborted: Counter[str] = Counter()
        """Number of aborts, by request id."""
        self._num_tokens: dict[int, int] = {}
        """Tokens that each slot has sampled, as it said last."""
        self._progress_at_s: dict[int, float] = {}
        self._changed = ChangeSignal()

    def open(self, request: GenerateRequest) -> InFlight:
        # A first attempt keeps its name: a generator's random stream may follow from it. A second one after an abort
        # has another, so that the first one's late answer is never taken for its.
        aborted = self._num_aborted[request.id]
        name = f"{request.id}~{aborted}" if aborted else request.id
        flight = InFlight(name, request, asyncio.get_running_loop().create_future(), generated=len(request.generated))
        self._by_name[name] = flight
        return flight

    def reopen(self, flight: InFlight) -> None:
        """Make the request ready to begin again: its slot was lost, with the tokens that were generated there."""
        flight.num_lost += 1
        flight.generated = len(flight.request.generated)
        flight.arrival = asyncio.get_running_loop().create_future()
        self.board(flight, None)

    def close(self, flight: InFlight, aborted: bool) -> None:
        del self._by_name[flight.name]
        flight.arrival.cancel()  # its caller does not wait for it any more
        if aborted:  # an entry for each request that was ever made would only grow
            self._num_aborted[flight.request.id] += 1
        self._changed.notify_all()

    def board(self, flight: InFlight, slot: int | None) -> None:
        """Note that the request is at this slot from now on; None: at none."""
        flight.slot, flight.since_s = slot, self._clock()
        self._predict(flight)
        self._changed.notify_all()

    def get(self, name: str) -> InFlight | None:
        return self._by_name.get(name)

    def is_under_way(self, flight: InFlight) -> bool:
        return self._by_name.get(flight.name) is flight and not flight.arrival.done()

    def at(self, slot: int) -> list[InFlight]:
        return [flight for flight in self._by_name.values() if flight.slot == slot]

    async def gone_from(self, slot: int, timeout_s: float) -> None:
        """Returns when no request is at this slot. Raises TimeoutError."""
        await self._changed.wait_for(lambda: not self.at(slot), timeout_s)

    def patience_s(self, flight: InFlight, timeout_s: float) -> float:
        """Seconds until the request's generator has made no progress for `timeout_s`. Between two generators it is the
        whole `timeout_s`: no generator is to blame, and the handoff has deadlines of its own."""
        if flight.slot is None or flight.landing:
            return timeout_s
        return max(flight.since_s, self._progress_at_s.get(flight.slot, flight.since_s)) + timeout_s - self._clock()

    def note_answers(self, slot: int, generations: Iterable[Generation]) -> list[Generation]:
        """Returns the completions that were waited for, under the ids of their requests."""
        self._progress_at_s[slot] = self._clock()
        landed: list[Generation] = []
        for generation in generations:
            flight = self._by_name.get(generation.id)
            if flight and flight.slot == slot and not flight.arrival.done():
                self.answers.note(flight.request, generation)
                generation = replace(generation, id=flight.request.id)
                flight.arrival.set_result(generation)
                landed.append(generation)
        return landed

    def note_stats(self, slot: int, stats: EngineStats) -> None:
        if stats.num_tokens != self._num_tokens.get(slot, 0):
            self._progress_at_s[slot] = self._clock()
            self._num_tokens[slot] = stats.num_tokens
        for name, generated in stats.generated.items():
            flight = self._by_name.get(name)
            if flight and flight.slot == slot:
                flight.generated = max(flight.generated, generated)
                self._predict(flight)

    def loads(self, slots: Sequence[int]) -> list[GeneratorLoad]:
        """Predicted work that each slot still has."""
        remaining = dict.fromkeys(slots, 0.0)
        groups: dict[int, set[str]] = {slot: set() for slot in slots}
        for flight in self._by_name.values():
            if flight.slot in remaining:
                remaining[flight.slot] += flight.predicted_tokens
                if flight.request.group:
                    groups[flight.slot].add(flight.request.group)
        return [GeneratorLoad(slot, remaining[slot], frozenset(groups[slot])) for slot in slots]

    def unfinished(self) -> tuple[Unfinished, ...]:
        """All requests that are at a generator, as policies see them; their ids are those on the wire."""
        return tuple(
            Unfinished(
                id=flight.name,
                slot=flight.slot,
                prompt_tokens=len(flight.request.prompt),
                generated=flight.generated,
                limit=flight.request.sampling.max_tokens,
                group=flight.request.group,
                num_turns=flight.request.num_turns,
            )
            for flight in self._by_name.values()
            if flight.slot is not None and not flight.arrival.done()
        )

    def _predict(self, flight: InFlight) -> None:
        limit = flight.request.sampling.max_tokens
        flight.predicted_tokens = predicted_tokens(limit, flight.generated, self.answers.mean)
