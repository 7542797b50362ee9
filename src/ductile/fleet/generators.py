"""The generators behind one call: `generate` sends a sequence where there is room and waits until it comes back.

pool       the base class: which generators there are, who joins, who leaves, which version is live
in flight  which sequence is where, how far it is
dispatch   requests and aborts on their way
migration  requests that go to another generator
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NoReturn

from ductile.concurrency.background import finish
from ductile.concurrency.deadline import said
from ductile.concurrency.listeners import Listeners
from ductile.core.instances.instances import Instance, InstanceId
from ductile.core.instances.routing import route
from ductile.core.scheduling.orders import Migration
from ductile.core.scheduling.state import Lengths, Unfinished
from ductile.fleet.dispatch import Dispatch
from ductile.fleet.in_flight import InFlight, RequestsInFlight
from ductile.fleet.leases import WeightLeases
from ductile.fleet.migration import MigrationResult, Migrator
from ductile.fleet.worker_pool import Server, WorkerPool
from ductile.messages.workers import EngineStats, Finished
from ductile.records import GenerateRequest, Generation
from ductile.roles import Failure, Late, NotTaken, SlotLost
from ductile.transport.deadlines import Deadlines
from ductile.transport.mailbox import Died, Mailbox, SlotEvent

MOST_LOST = 5
"""Generators that may be lost with one request before it fails."""
NOT_TAKEN_S = 0.1
"""Seconds until a request is sent again that an instance did not take."""


class RemoteGenerators(WorkerPool):
    """Follows `ductile.roles.Generators`."""

    def __init__(
        self,
        mailbox: Mailbox,
        instances: Iterable[Instance],
        max_num_seqs: int,
        block_tokens: int,
        deadlines: Deadlines,
        clock: Callable[[], float] = time.monotonic,
        leases: WeightLeases | None = None,
        servers: Mapping[InstanceId, Server] | None = None,
        condemn: Callable[[int, str], None] | None = None,
    ) -> None:
        """max_num_seqs: of one generator. block_tokens: as `core.instances.routing.route` has it.
        leases, servers, condemn: as `WorkerPool` has them."""
        self.on_finished = Listeners[[Generation]]()
        """Told of every completion, as it comes."""
        self.on_restarted = Listeners[[str, InstanceId | None]]()
        """Told with a sentence and the lost generator when a request begins again, because its generator was lost;
        None where it was between two."""
        super().__init__(mailbox, "generate", instances, deadlines, leases, servers, condemn)
        self._max_num_seqs, self._block_tokens = max_num_seqs, block_tokens
        self._in_flight = RequestsInFlight(clock)
        self._dispatch = Dispatch(self)

    @property
    def capacity(self) -> int:
        return self._max_num_seqs * len(self.instances)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Waits for a generator while there is none. Raises SlotLost, Late or Refused.

        What was under way at a generator that is lost begins again at another one; a generator that makes no progress
        is killed. A request that MOST_LOST generators were lost with fails: it may be what ends them.
        """
        entry, aborted = self._in_flight.open(request), False
        lost = set[Instance]()
        try:
            while True:
                try:
                    await self._send(entry, lost)
                    return await self._wait_for(entry)
                except Failure as error:
                    if entry.instance is not None and isinstance(error, SlotLost):
                        lost.add(entry.instance)
                    self._begin_again(entry, error)
                    if isinstance(error, NotTaken):  # nothing tells when the instance takes requests again
                        await asyncio.sleep(NOT_TAKEN_S)
        except (asyncio.CancelledError, Late):
            aborted = True
            self._dispatch.abort(entry)
            raise
        finally:
            self._in_flight.close(entry, aborted)

    async def dismiss(self, instance: Instance) -> None:
        """Have the instance generate no more, once what it has has left or ended. Raises Late, Refused or SlotLost."""
        self.drain(instance)
        try:
            await self._in_flight.gone_from(instance, self._deadlines.patience_s)
        except TimeoutError:
            left = len(self._in_flight.at(instance))
            described = self.describe(instance)
            waited = said(self._deadlines.patience_s)
            raise Late(f"{described} still had {left} requests after {waited}, and cannot leave") from None
        await self.release(instance)
        self._in_flight.forget(instance)

    async def migrate(self, migrations: Sequence[Migration]) -> tuple[MigrationResult, ...]:
        """Returns one result a migration, in their order. Migrations go on to their end when the caller is cancelled.

        Raises Late when they could not begin, as a version was going live.
        """
        return await finish(self._migrate(migrations))

    def unfinished(self) -> tuple[Unfinished, ...]:
        """Requests in flight, as policies see them; `Unfinished.id` is what `migrate` understands."""
        return self._in_flight.unfinished()

    def lengths(self) -> Lengths:
        """Lengths of the latest completions."""
        return self._in_flight.completion_lengths.lengths()

    async def _send(self, entry: InFlight, lost: Collection[Instance]) -> None:
        instances = await self.some(f"request {entry.name}", lost)
        request, loads = entry.request, self._in_flight.loads(instances)
        chosen = route(request.group, loads, len(request.prompt), self._block_tokens).instance
        self._in_flight.note_instance(entry, next(each for each in instances if each.id == chosen))
        self._dispatch.send(entry)

    async def _wait_for(self, entry: InFlight) -> Generation:
        while not entry.completion.done():
            limit_s = self._deadlines.progress_s
            patience_s = self._in_flight.patience_s(entry, limit_s)
            if patience_s <= 0 and entry.instance is not None:
                self._kill(entry.instance, entry.request.id, limit_s)
            await asyncio.wait([entry.completion], timeout=patience_s)
        return entry.completion.result()

    def _kill(self, instance: Instance, request: str, limit_s: float) -> NoReturn:
        """Kill a generator that makes no progress. Raises SlotLost; Late for an external server, which is not ours to
        kill."""
        stuck = f"{self.describe(instance)} made no progress for {said(limit_s)} while it had to generate {request}"
        if not instance.slots:
            raise Late(stuck)
        for slot in instance.slots:
            self._condemn(slot, f"{stuck}, and has been killed")
        raise SlotLost(self.why_lost(instance))

    def _begin_again(self, entry: InFlight, error: Failure) -> None:
        """Raises `error` if it must not."""
        if not error.retryable:
            raise error
        lost = entry.where
        if isinstance(error, SlotLost):
            if entry.num_lost + 1 == MOST_LOST:
                why = f"{error}; {MOST_LOST} generators were lost while they had {entry.request.id}"
                raise SlotLost(why) from error
        elif entry.num_not_taken * NOT_TAKEN_S > self._deadlines.patience_s:
            raise error
        self._in_flight.reopen(entry, is_lost=isinstance(error, SlotLost))
        self.on_restarted(f"Request {entry.request.id} begins again: {error}.", lost)

    async def _migrate(self, migrations: Sequence[Migration]) -> tuple[MigrationResult, ...]:
        async with self.lock.shared(f"{len(migrations)} requests change generators"):
            return await Migrator(self, self._in_flight, self._dispatch, self._block_tokens).run(migrations)

    def on_event(self, instance: Instance, event: SlotEvent) -> None:
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
