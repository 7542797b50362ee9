"""The generators behind one call: `generate` sends a sequence where there is room and waits until it comes back.

pool       which generators there are, who joins, who leaves, which version is live
in flight  which sequence is where, how far it is
dispatch   requests and aborts on their way
migration  requests that go to another generator
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ductile.core.cluster.instances import Instance, InstanceId, slots_on
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
from ductile.wire.worker_pool import Server, WorkerPool, any_slot


class RemoteGenerators:
    """Follows `ductile.roles.Generators`."""

    def __init__(
        self,
        mailbox: Mailbox,
        instances: Iterable[Instance],
        max_num_seqs: int,
        block_tokens: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        leases: WeightLeases | None = None,
        depends_on: Callable[[int], bool] = any_slot,
        servers: Mapping[InstanceId, Server] | None = None,
    ) -> None:
        """max_num_seqs: of one generator. block_tokens: as `core.cluster.routing.route` has it.
        timeout_s: without any progress of a generator, its sequences are `Late`.
        leases, depends_on, servers: as `WorkerPool` has them."""
        self.on_finished: Callable[[Generation], None] = lambda generation: None
        """Called with every completion, as it comes."""
        self.on_restarted: Callable[[str, InstanceId], None] = lambda sentence, lost: None
        """Called with a sentence and the lost generator when a request begins again, because its generator was lost."""
        self._max_num_seqs, self._timeout_s, self._block_tokens = max_num_seqs, timeout_s, block_tokens
        self._pool = WorkerPool(mailbox, "generate", instances, timeout_s, leases, depends_on, servers)
        self._in_flight = RequestsInFlight(clock)
        self._dispatch = Dispatch(self._pool)
        self._pool.subscribe(self._on_event)

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Generators that take requests."""
        return self._pool.instances

    @property
    def all_instances(self) -> tuple[Instance, ...]:
        """All generators, those that take no requests yet or any more among them."""
        return self._pool.all_instances

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of the generators that take requests."""
        return slots_on(self.instances)

    @property
    def capacity(self) -> int:
        return self._max_num_seqs * len(self.instances)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a generator, as there is none."""
        return self._pool.num_waiting

    def on_capacity(self, callback: Callable[[], None]) -> None:
        """Have `callback()` called whenever `instances` have changed, or a request begins to wait for one."""
        self._pool.on_change = callback

    async def generate(self, request: GenerateRequest) -> Generation:
        """Waits for a generator while there is none. Raises SlotLost, Late or Refused.

        What was under way at a generator that is lost begins again at another one, once, unless the run ends with it.
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

    async def admit(self, instance: Instance, settings: Mapping[str, object]) -> bool:
        """`WorkerPool.admit`: True when it takes requests now, False when it does so from the next version on."""
        return await self._pool.admit(instance, settings)

    def drain(self, slot: int) -> None:
        """Send the generator on this slot no new requests: it is about to leave."""
        if instance := self._pool.on(slot):
            self._pool.drain(instance)

    def resume(self, slot: int) -> None:
        """If the generator on this slot is draining, it stays, and gets requests again."""
        if instance := self._pool.on(slot):
            self._pool.resume(instance)

    async def dismiss(self, instance: Instance) -> None:
        """Have the instance generate no more, once what it has has left or ended. Raises Late, Refused or SlotLost."""
        self._pool.drain(instance)
        try:
            await self._in_flight.gone_from(instance, self._timeout_s)
        except TimeoutError:
            left = len(self._in_flight.at(instance))
            described = self._pool.describe(instance)
            raise Late(f"{described} still had {left} requests after {self._timeout_s:g} s, and cannot leave") from None
        await self._pool.release(instance)
        self._in_flight.forget(instance)

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
        """Predicted work that each generator still has."""
        return self._in_flight.loads(self.instances)

    async def _send(self, entry: InFlight) -> None:
        instances = await self._pool.some(f"request {entry.name}")
        request, loads = entry.request, self._in_flight.loads(instances)
        chosen = route(request.group, loads, len(request.prompt), self._block_tokens).instance
        self._in_flight.note_instance(entry, next(each for each in instances if each.id == chosen))
        self._dispatch.send(entry)

    async def _wait_for(self, entry: InFlight) -> Generation:
        while not entry.completion.done():
            patience_s = self._in_flight.patience_s(entry, self._timeout_s)
            if patience_s <= 0 and entry.instance is not None:
                raise Late(
                    f"{self._pool.describe(entry.instance)} made no progress for {self._timeout_s:g} s while it had "
                    f"to generate {entry.request.id}"
                )
            await asyncio.wait([entry.completion], timeout=patience_s)
        return entry.completion.result()

    def _begin_again(self, entry: InFlight, error: SlotLost) -> None:
        """Raises `error` if it must not."""
        instance = entry.instance
        if entry.num_lost or instance is None or self._pool.depends_on(instance):
            raise error
        self._in_flight.reopen(entry)
        self.on_restarted(f"Request {entry.request.id} begins again: {error}.", instance.id)

    async def _migrate(self, migrations: Sequence[Migration]) -> tuple[MigrationResult, ...]:
        async with self._pool.lock.shared(f"{len(migrations)} requests change generators"):
            return await Migrator(self._pool, self._in_flight, self._dispatch, self._block_tokens).run(migrations)

    def _on_event(self, instance: Instance, event: Event) -> None:
        match event:
            case Finished(generations):
                for generation in self._in_flight.note_completions(instance, generations):
                    self.on_finished(generation)
            case EngineStats():
                self._in_flight.note_stats(instance, event)
            case Died(reason):
                self._in_flight.forget(instance)
                for entry in self._in_flight.at(instance):
                    if not entry.migrating:
                        entry.fail(SlotLost(reason))
            case _:
                pass
