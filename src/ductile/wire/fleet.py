"""The generators behind one call: `generate` sends a sequence where there is room and waits until it comes back.

roster     which slots generate, who joins, who leaves, which version is live
flights    which sequence is where, how far it is
dispatch   requests and aborts on their way
handover   sequences that change generators
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from ductile.core.cluster.orders import Handoff
from ductile.core.cluster.routing import GeneratorLoad, route
from ductile.core.cluster.state import Lengths, Unfinished
from ductile.records import GenerateRequest, Generation, Manifest
from ductile.roles import Late, SlotLost
from ductile.wire.dispatch import Dispatch
from ductile.wire.finish import finish
from ductile.wire.flights import Flights, InFlight
from ductile.wire.handover import HandoffResult, Handover
from ductile.wire.leases import WeightLeases
from ductile.wire.mailbox import Mailbox
from ductile.wire.messages import Died, EngineStats, Event, Finished
from ductile.wire.roster import Roster, whatever_slot


class RemoteGenerators:
    """Follows `ductile.roles.Generators`."""

    def __init__(
        self,
        mailbox: Mailbox,
        slots: Sequence[int],
        max_num_seqs: int,
        block_tokens: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        leases: WeightLeases | None = None,
        depends_on: Callable[[int], bool] = whatever_slot,
    ) -> None:
        """max_num_seqs: of one generator. block_tokens: as `core.cluster.routing.route` has it.
        timeout_s: without any progress of a slot, its sequences are `Late`.
        leases: None where no slot ever joins. depends_on: whether the run ends when this slot is lost."""
        self.on_finished: Callable[[Generation], None] = lambda generation: None
        """Called with every completion, as it comes."""
        self.on_restarted: Callable[[str], None] = lambda sentence: None
        """Called with a sentence when a request begins again, because its slot was lost."""
        self._mailbox, self._max_num_seqs, self._timeout_s = mailbox, max_num_seqs, timeout_s
        self._block_tokens = block_tokens
        self._depends_on = depends_on
        self._roster = Roster(mailbox, "generate", slots, timeout_s, leases, depends_on)
        self._flights = Flights(clock)
        self._dispatch = Dispatch(mailbox, timeout_s)
        mailbox.subscribe(self._on_event)

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots that take requests."""
        return self._roster.slots

    @property
    def capacity(self) -> int:
        return self._max_num_seqs * len(self.slots)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a generator, as there is none."""
        return self._roster.num_waiting

    def on_capacity(self, callback: Callable[[], None]) -> None:
        """Have `callback()` called whenever `slots` have changed, or a request begins to wait for one."""
        self._roster.on_change = callback

    async def generate(self, request: GenerateRequest) -> Generation:
        """Waits for a generator while there is none. Raises SlotLost, Late or Refused.

        What was under way at a slot that is lost begins again at another one, once, unless the run ends with that slot.
        """
        flight, aborted = self._flights.open(request), False
        try:
            while True:
                try:
                    await self._take_off(flight)
                    return await self._landing(flight)
                except SlotLost as error:
                    self._begin_again(flight, error)
        except (asyncio.CancelledError, Late):
            aborted = True
            self._dispatch.abort(flight)
            raise
        finally:
            self._flights.close(flight, aborted)

    async def receive(self, manifest: Manifest) -> None:
        await self._roster.receive(manifest)

    async def admit(self, slot: int, settings: Mapping[str, object]) -> bool:
        """`Roster.admit`: True when it takes requests now, False when it does so from the next version on."""
        return await self._roster.admit(slot, settings)

    def hold(self, slot: int) -> None:
        """Send the slot no new requests: it is about to leave."""
        self._roster.hold(slot)

    def resume(self, slot: int) -> None:
        """A held slot stays, and gets requests again."""
        self._roster.resume(slot)

    async def dismiss(self, slot: int) -> None:
        """Have the slot generate no more, once what it has has left or ended. Raises Late, Refused or SlotLost."""
        self._roster.hold(slot)
        try:
            await self._flights.gone_from(slot, self._timeout_s)
        except TimeoutError:
            left = len(self._flights.at(slot))
            described = self._mailbox.describe(slot)
            raise Late(f"{described} still had {left} requests after {self._timeout_s:g} s, and cannot leave") from None
        await self._roster.drop(slot)

    async def hand_off(self, handoffs: Sequence[Handoff]) -> tuple[HandoffResult, ...]:
        """Returns one result a handoff, in their order. Handoffs go on to their end when the caller is cancelled.

        Raises Late when they could not begin, as a version was going live.
        """
        return await finish(self._dispatch.start(self._hand_off(handoffs)))

    def unfinished(self) -> tuple[Unfinished, ...]:
        """Requests in flight, as policies see them; `Unfinished.id` is what `hand_off` understands."""
        return self._flights.unfinished()

    def lengths(self) -> Lengths:
        """Lengths of the latest completions."""
        return self._flights.answers.lengths()

    def loads(self) -> list[GeneratorLoad]:
        """Predicted work that each slot still has."""
        return self._flights.loads(self.slots)

    async def _take_off(self, flight: InFlight) -> None:
        slots = await self._roster.some(f"request {flight.name}")
        request, loads = flight.request, self._flights.loads(slots)
        self._flights.board(flight, route(request.group, loads, len(request.prompt), self._block_tokens).slot)
        self._dispatch.send(flight)

    async def _landing(self, flight: InFlight) -> Generation:
        while not flight.arrival.done():
            patience_s = self._flights.patience_s(flight, self._timeout_s)
            if patience_s <= 0 and flight.slot is not None:
                raise Late(
                    f"{self._mailbox.describe(flight.slot)} made no progress for {self._timeout_s:g} s while it had "
                    f"to generate {flight.request.id}"
                )
            await asyncio.wait([flight.arrival], timeout=patience_s)
        return flight.arrival.result()

    def _begin_again(self, flight: InFlight, error: SlotLost) -> None:
        """Raises `error` if it must not."""
        slot = flight.slot
        if flight.num_lost or slot is None or self._depends_on(slot):
            raise error
        self._flights.reopen(flight)
        self.on_restarted(f"Request {flight.request.id} begins again: {error}.")

    async def _hand_off(self, handoffs: Sequence[Handoff]) -> tuple[HandoffResult, ...]:
        async with self._roster.turns.together(f"{len(handoffs)} requests change generators"):
            handover = Handover(
                self._mailbox, self._roster, self._flights, self._dispatch, self._block_tokens, self._timeout_s
            )
            return await handover.run(handoffs)

    def _on_event(self, slot: int, event: Event) -> None:
        match event:
            case Finished(generations):
                for generation in self._flights.note_answers(slot, generations):
                    self.on_finished(generation)
            case EngineStats():
                self._flights.note_stats(slot, event)
            case Died(reason):
                for flight in self._flights.at(slot):
                    if not flight.landing:
                        flight.fail(SlotLost(reason))
            case _:
                pass
