"""Unfinished requests leave their generators with the tokens that they have, and go on at others.

    MigrateOut  to each source          it forgets them and replies with their tokens; caches that go along stay there
    Generate    to each target          with the handles that say where the caches lie
    Forget      to each source          once the targets have taken them

Requests keep their names, and the caller of `generate` notices nothing. One that ends in the meantime is simply
finished; one that is aborted on the way goes to no generator. When a target does not take what it was to take, another
generator does, the source last; when there is none, the request fails with what the target said. Each migration has one
outcome.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ductile.core.instances.instances import Instance, InstanceId
from ductile.core.instances.routing import route
from ductile.core.scheduling.orders import Migration
from ductile.fleet.requests.dispatch import Dispatch
from ductile.fleet.requests.in_flight import InFlight, RequestsInFlight
from ductile.fleet.requests.worker_pool import WorkerPool
from ductile.messages.workers import Forget, Generate, MigratedOut, MigrateOut
from ductile.records import KVHandle
from ductile.roles import Failure, Late, NotTaken, Refused, SlotLost


@dataclass(frozen=True, slots=True)
class MigrationResult:
    """Outcome of one migration."""

    order: Migration
    instance: InstanceId | None
    """Generator where the request goes on; None: nowhere, it has ended or failed."""
    with_cache: bool = False
    why: str = ""
    """Reason for which the migration is not as it was ordered: "it had ended", "generator-3 refused it". "" when it
    is."""


@dataclass(slots=True, eq=False)
class _Migrating:
    order: Migration
    entry: InFlight
    target: InstanceId
    cache: KVHandle | None
    tried: set[InstanceId] = field(default_factory=set[InstanceId])
    why: str = ""


class Migrator:
    """Carries one set of migrations out, once: `await Migrator(...).run(orders)`."""

    def __init__(self, pool: WorkerPool, requests: RequestsInFlight, dispatch: Dispatch, block_tokens: int) -> None:
        """block_tokens: as `core.instances.routing.route` has it."""
        self._pool, self._in_flight, self._dispatch, self._block_tokens = pool, requests, dispatch, block_tokens
        self._results: dict[str, MigrationResult] = {}
        self._kept: dict[Instance, list[str]] = {}
        """Names of the requests whose KV caches a source keeps for other generators, by source."""

    async def run(self, orders: Sequence[Migration]) -> tuple[MigrationResult, ...]:
        by_source: dict[Instance, list[tuple[Migration, InFlight]]] = {}
        for order in orders:
            entry = self._in_flight.get(order.id)
            if entry is None or entry.instance is None or entry.where != order.source or entry.completion.done():
                self._note_absent(order, entry)
            else:
                by_source.setdefault(entry.instance, []).append((order, entry))
        left = await asyncio.gather(*(self._take_from(source, leaving) for source, leaving in by_source.items()))
        await self._place_all([migrating for requests in left for migrating in requests])
        await asyncio.gather(*(self._forget(source, names) for source, names in self._kept.items()))
        return tuple(self._results[order.id] for order in orders)

    async def _take_from(self, source: Instance, leaving: Sequence[tuple[Migration, InFlight]]) -> list[_Migrating]:
        """Take requests away from their source. Returns those that are now between two generators."""
        names = tuple(entry.name for _, entry in leaving)
        with_cache = tuple(order.id for order, _ in leaving if order.with_cache)
        try:
            reply = await self._pool.ask(source, MigrateOut(names, with_cache))
            if not isinstance(reply, MigratedOut):
                raise Refused(f"{self._pool.describe(source)} replied to MigrateOut with {type(reply).__name__}")
        except Failure as error:
            for order, entry in leaving:
                self._note_not_left(order, entry, error)
            return []
        if reply.caches:
            self._kept[source] = list(reply.caches)
        given = {request.id: request for request in reply.requests}
        requests: list[_Migrating] = []
        for order, entry in leaving:
            request = given.get(entry.name)
            here = self._in_flight.is_under_way(entry) and entry.instance == source
            if here and request is not None:
                entry.take(request)
                self._in_flight.note_instance(entry, None)
                requests.append(_Migrating(order, entry, order.target, reply.caches.get(entry.name)))
            else:
                if here:
                    entry.fail(Refused(f"{self._pool.describe(source)} does not know {entry.name}, which it had"))
                self._note_absent(order, None)
        return requests

    async def _place_all(self, requests: Sequence[_Migrating]) -> None:
        while requests:
            by_target: dict[InstanceId, list[_Migrating]] = {}
            for migrating in requests:
                by_target.setdefault(migrating.target, []).append(migrating)
            refused = await asyncio.gather(*(self._place(target, group) for target, group in by_target.items()))
            requests = [migrating for group in refused for migrating in group]

    async def _place(self, target: InstanceId, requests: Sequence[_Migrating]) -> list[_Migrating]:
        """Bring requests to a target. Returns those that go to another generator now."""
        wanted = [migrating for migrating in requests if self._is_still_wanted(migrating)]
        if not wanted:
            return []
        for migrating in wanted:
            migrating.tried.add(target)
        try:
            await self._generate_at(target, wanted)
        except Failure as error:
            return [migrating for migrating in wanted if self._turns_to_another(migrating, target, error)]
        for migrating in wanted:
            entry = migrating.entry
            if entry.where == target:
                self._in_flight.note_instance(entry, entry.instance)  # its generator's time runs from now on
            self._note(migrating.order, target, migrating.cache is not None, migrating.why)
        return []

    async def _generate_at(self, target: InstanceId, requests: Sequence[_Migrating]) -> None:
        instance = next((each for each in self._pool.serving if each.id == target), None)
        if instance is None:
            raise NotTaken(f"{target} takes no requests")
        entries = [migrating.entry for migrating in requests]
        caches = {migrating.entry.name: migrating.cache for migrating in requests if migrating.cache is not None}
        for entry in entries:
            self._in_flight.note_instance(entry, instance)
        self._in_flight.note_migrating(entries, migrating=True)
        try:
            generate = Generate(tuple(entry.on_wire for entry in entries), caches)
            await self._pool.ask(instance, generate)
        finally:
            self._in_flight.note_migrating(entries, migrating=False)
        if why := self._pool.why_lost(instance):  # just after it had said that it takes them
            raise SlotLost(why)

    def _turns_to_another(self, migrating: _Migrating, target: InstanceId, error: Exception) -> bool:
        if not self._is_still_wanted(migrating):
            return False
        entry = migrating.entry
        self._in_flight.note_migrating([entry], migrating=False)
        if isinstance(error, Late) and entry.where == target:
            self._dispatch.abort(entry)  # it may have taken it
        migrating.why = migrating.why or str(error)
        # Who gave it away can take it again, though it was about to leave: then it leaves later.
        untried = [each for each in self._pool.serving if each.id not in migrating.tried]
        others = [each for each in untried if each in self._pool.instances] or [
            each for each in untried if each.id == migrating.order.source
        ]
        if not others:
            self._in_flight.note_migrating([entry], migrating=False)
            entry.fail(error)
            self._note(migrating.order, None, why=migrating.why)
            return False
        self._in_flight.note_instance(entry, None)
        request = entry.request
        loads = self._in_flight.loads(others)
        migrating.target = route(request.group, loads, len(request.prompt), self._block_tokens).instance
        # It counts there from now on: those that turn to another one after it must not all go to the same.
        self._in_flight.note_instance(entry, next(each for each in others if each.id == migrating.target))
        self._in_flight.note_migrating([entry], migrating=True)
        return True

    def _is_still_wanted(self, migrating: _Migrating) -> bool:
        if self._in_flight.is_under_way(migrating.entry):
            return True
        self._note_absent(migrating.order, None)
        return False

    async def _forget(self, source: Instance, names: Sequence[str]) -> None:
        with suppress(Failure):  # what a lost slot kept is gone with it
            await self._pool.ask(source, Forget(tuple(names)))

    def _note_not_left(self, order: Migration, entry: InFlight, error: Exception) -> None:
        """Note that a request has not left: a generator that refuses has given nothing away. One that is late may have,
        into nowhere."""
        if isinstance(error, Refused) and self._in_flight.is_under_way(entry):
            self._note(order, order.source, why=str(error))
            return
        if entry.where == order.source:
            entry.fail(error)
        self._note(order, None, why=str(error))

    def _note_absent(self, order: Migration, entry: InFlight | None) -> None:
        if entry is None or entry.completion.done():
            self._note(order, None, why="it had ended")
        else:
            where = entry.where or "no generator"
            self._note(order, entry.where, why=f"it was at {where}, and not at {order.source}")

    def _note(self, order: Migration, instance: InstanceId | None, with_cache: bool = False, why: str = "") -> None:
        self._results[order.id] = MigrationResult(order, instance, with_cache, why)
