"""The generators behind one call: `generate` sends a sequence where there is room and waits until it comes back.

pool       which slots generate, who joins, who leaves, which version is live
in flight  which sequence is where, how far it is
dispatch   requests and aborts on their way
migration  requests that go to another generator
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from ductile.core.cluster.orders import Migration
from ductile.core.cluster.routing import GeneratorLoad, route
from ductile.core.cluster.state import Lengths, Unfinished
from ductile.records import GenerateRequest, Generation, Manifest
from ductile.roles import Late, SlotLost
from ductile.wire.background import finish
from ductile.wire.dispatch import Dispatch
from ductile.wire.in_flight import InFlight, RequestsInFlight
from ductile.wire.leases import WeightLeases
from ductile.wire.mailbox import Mailbox
from ductile.wire.messages import Died, EngineStats, Event, Finished
from ductile.wire.migration import MigrationResult, Migrator
from ductile.wire.worker_pool import WorkerPool, any_slot


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
        depends_on: Callable[[int], bool] = any_slot,
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
        self._pool = WorkerPool(mailbox, "generate", slots, timeout_s, leases, depends_on)
        self._in_flight = RequestsInFlight(clock)
        self._dispatch = Dispatch(mailbox, timeout_s)
        mailbox.subscribe(self._on_event)

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots that take requests."""
        return self._pool.slots

    @property
    def capacity(self) -> int:
        return self._max_num_seqs * len(self.slots)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a generator, as there is none."""
        return self._pool.num_waiting

    def on_capacity(self, callback: Callable[[], None]) -> None:
        """Have `callback()` called whenever `slots` have changed, or a request begins to wait for one."""
        self._pool.on_change = callback

    async def generate(self, request: GenerateRequest) -> Generation:
        """Waits for a generator while there is none. Raises SlotLost, Late or Refused.

        What was under way at a slot that is lost begins again at another one, once, unless the run ends with that slot.
        """
        entry, aborted = self._in_flight.open(request), False
        try:
            while True:
                try:
                    await self._send(entry)
                    return await self._wait_for(entry)
                except SlotLost as error:
                    self._begin_again(entry, error)
        except (asyncio.CancelledError, Late):
            aborted = True
            self._dispatch.abort(entry)
            raise
        finally:
            self._in_flight.close(entry, aborted)

    async def receive(self, manifest: Manifest) -> None:
        await self._pool.receive(manifest)

    async def admit(self, slot: int, settings: Mapping[str, object]) -> bool:
        """`WorkerPool.admit`: True when it takes requests now, False when it does so from the next version on."""
        return await self._pool.admit(slot, settings)

    def drain(self, slot: int) -> None:
        """Send the slot no new requests: it is about to leave."""
        self._pool.drain(slot)

    def resume(self, slot: int) -> None:
        """A draining slot stays, and gets requests again."""
        self._pool.resume(slot)

    async def dismiss(self, slot: int) -> None:
        """Have the slot generate no more, once what it has has left or ended. Raises Late, Refused or SlotLost."""
        self._pool.drain(slot)
        try:
            await self._in_flight.gone_from(slot, self._timeout_s)
        except TimeoutError:
            left = len(self._in_flight.at(slot))
            described = self._mailbox.describe(slot)
            raise Late(f"{described} still had {left} requests after {self._timeout_s:g} s, and cannot leave") from None
        await self._pool.release(slot)

    async def migrate(self, migrations: Sequence[Migration]) -> tuple[MigrationResult, ...]:
        """Returns one result a migration, in their order. Migrations go on to their end when the caller is cancelled.

        Raises Late when they could not begin, as a version was going live.
        """
        return await finish(self._dispatch.start(self._migrate(migrations)))

    def unfinished(self) -> tuple[Unfinished, ...]:
        """Requests in flight, as policies see them; `Unfinished.id` is what `migrate` understands."""
        return self._in_flight.unfinished()

    def lengths(self) -> Lengths:
        """Lengths of the latest completions."""
        return self._in_flight.completion_lengths.lengths()

    def loads(self) -> list[GeneratorLoad]:
        """Predicted work that each slot still has."""
        return self._in_flight.loads(self.slots)

    async def _send(self, entry: InFlight) -> None:
        slots = await self._pool.some(f"request {entry.name}")
        request, loads = entry.request, self._in_flight.loads(slots)
        self._in_flight.note_slot(entry, route(request.group, loads, len(request.prompt), self._block_tokens).slot)
        self._dispatch.send(entry)

    async def _wait_for(self, entry: InFlight) -> Generation:
        while not entry.completion.done():
            patience_s = self._in_flight.patience_s(entry, self._timeout_s)
            if patience_s <= 0 and entry.slot is not None:
                raise Late(
                    f"{self._mailbox.describe(entry.slot)} made no progress for {self._timeout_s:g} s while it had "
                    f"to generate {entry.request.id}"
                )
            await asyncio.wait([entry.completion], timeout=patience_s)
        return entry.completion.result()

    def _begin_again(self, entry: InFlight, error: SlotLost) -> None:
        """Raises `error` if it must not."""
        slot = entry.slot
        if entry.num_lost or slot is None or self._depends_on(slot):
            raise error
        self._in_flight.reopen(entry)
        self.on_restarted(f"Request {entry.request.id} begins again: {error}.")

    async def _migrate(self, migrations: Sequence[Migration]) -> tuple[MigrationResult, ...]:
        async with self._pool.lock.shared(f"{len(migrations)} requests change generators"):
            migrator = Migrator(
                self._mailbox, self._pool, self._in_flight, self._dispatch, self._block_tokens, self._timeout_s
            )
            return await migrator.run(migrations)

    def _on_event(self, slot: int, event: Event) -> None:
        match event:
            case Finished(generations):
                for generation in self._in_flight.note_completions(slot, generations):
                    self.on_finished(generation)
            case EngineStats():
                self._in_flight.note_stats(slot, event)
            case Died(reason):
                for entry in self._in_flight.at(slot):
                    if not entry.migrating:
                        entry.fail(SlotLost(reason))
            case _:
                pass
