"""The generators behind one call: `generate` sends a sequence where there is room and waits until it comes back.

pool       the base class: which generators there are, who joins, who leaves, which version is live
in flight  which sequence is where, how far it is
dispatch   requests and aborts on their way
migration  requests that go to another generator
"""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import NoReturn, get_args

from ductile.concurrency.background import finish
from ductile.concurrency.deadline import said
from ductile.concurrency.listeners import Listeners
from ductile.core.instances.instances import Instance, InstanceId
from ductile.core.instances.routing import Suspicion, route
from ductile.core.scheduling.facts.cluster_state import Lengths, Unfinished
from ductile.core.scheduling.orders import Migration
from ductile.fleet.requests.dispatch import Dispatch
from ductile.fleet.requests.in_flight import InFlight, RequestsInFlight
from ductile.fleet.requests.instance_port import InstanceEvent, Returned, RoleSlots
from ductile.fleet.requests.migration import MigrationResult, Migrator
from ductile.fleet.requests.weight_offers import WeightOffers
from ductile.fleet.requests.worker_pool import ANY_VERSION, MOST_LOST, WorkerPool
from ductile.messages.updates import LiveDigest
from ductile.messages.workers import DigestWeights, EngineStats, Finished, Heartbeat, Score, TrainCommand, WeightDigests
from ductile.records import GenerateRequest, Generation
from ductile.roles import Failure, Interrupted, Late, NotTaken, Refused, SlotLost
from ductile.transport.deadlines import Deadlines
from ductile.transport.mailbox import Died

NUM_LOOKS = 10
"""Looks for progress within `progress_timeout_s`. Looks are counted, and not seconds: while this process itself is
suspended it hears of no progress, and the terminal may have suspended its slots, too."""
OTHER_WORK = frozenset(kind.__name__ for kind in get_args(TrainCommand | Score))
"""Commands that a slot carries out for another role than the generator; each has a deadline of its own."""
NOT_TAKEN_S, MOST_NOT_TAKEN_S = 0.1, 1.0
"""Seconds until a request is sent again that no instance has taken, at first and at most."""


class _Stuck(Interrupted):
    """A server has made no progress, and may do so the next time that it is asked."""


class RemoteGenerators(WorkerPool):
    """Follows `ductile.roles.Generators`."""

    def __init__(
        self,
        slots: RoleSlots | None,
        instances: Iterable[Instance],
        max_num_seqs: int,
        block_tokens: int,
        deadlines: Deadlines,
        offers: WeightOffers | None = None,
    ) -> None:
        """max_num_seqs: of one generator, where it does not say its own. block_tokens: as
        `core.instances.routing.route` has it. slots, instances, offers: as `WorkerPool` has them."""
        self.on_finished = Listeners[[Generation]]()
        """Told of every completion, as it comes."""
        self.on_restarted = Listeners[[str, InstanceId | None]]()
        """Told with a sentence and the generator when a request begins again, because its generator was lost or did not
        take it; None where it was between two. Of generators in a row that do not take it, the first is told."""
        self.on_ended = Listeners[[InstanceId, Failure | None, float]]()
        """Told of each request that has ended at a generator: what it failed with there, None where it has not; and
        when the generator got it, by the event loop's clock."""
        super().__init__("generate", slots, instances, deadlines, offers)
        self._max_num_seqs, self._block_tokens = max_num_seqs, block_tokens
        self._in_flight = RequestsInFlight(lambda: asyncio.get_running_loop().time())
        self._dispatch = Dispatch(self)

    @property
    def capacity(self) -> int:
        """Sequences that the generators run at once; those that are suspect count only where none is well."""
        able = [each for each in self.instances if each.id not in self._in_flight.suspects] or self.instances
        return sum(self._ports[each.id].max_num_seqs or self._max_num_seqs for each in able)

    def suspect(self, id: InstanceId, why: str, on_trial: bool = False) -> None:
        """Give the generator only what no other one can take; on trial one request at a time; with "" for a reason,
        what it can, again."""
        self._in_flight.suspect(id, Suspicion(why, on_trial) if why else None)
        self.on_change()

    async def generate(self, request: GenerateRequest, versions: range = ANY_VERSION) -> Generation:
        """Waits for a generator while there is none. Raises SlotLost, Late, Refused or Interrupted. versions: those
        that a generator may have when it gets the request, such as range(7, 8).

        What was under way at a generator that is lost goes on at another one, with the tokens that are known of it; a
        generator that makes no progress is given up. A request that MOST_LOST generators were lost with while it came
        no further fails: it may be what ends them. One that a generator does not take, or does not do to its end,
        goes to another, and again to all of them when none is left. One that a server refuses fails only when no other
        generator is left: the server may be another than the run needs.
        """
        entry, aborted = self._in_flight.open(request), False
        lost, unwilling, refused = set[Instance](), set[Instance](), set[Instance]()
        try:
            while True:
                try:
                    await self._send(entry, lost | refused, unwilling, versions)
                    return await self._wait_for(entry)
                except Failure as error:
                    if entry.instance is not None:
                        self.on_ended(entry.instance.id, error, entry.since_s)
                        if isinstance(error, NotTaken | Interrupted):
                            unwilling.add(entry.instance)
                        elif isinstance(error, SlotLost) and entry.where in self._ports:
                            lost.add(entry.instance)  # the news of its death is still to come
                        elif isinstance(error, Refused) and not entry.instance.slots:
                            refused.add(entry.instance)
                            if not refused.issuperset(self.of_versions(versions)):
                                error = NotTaken(str(error))
                    self._begin_again(entry, error)
                    if unwilling.issuperset(
                        {*self.of_versions(versions)} - lost - refused
                    ):  # nothing tells when they take requests again
                        if isinstance(error, NotTaken | Interrupted):
                            await asyncio.sleep(self._not_taken_s(entry))
                        unwilling.clear()
        except (asyncio.CancelledError, Late):
            aborted = True
            self._dispatch.abort(entry)
            raise
        finally:
            self._in_flight.close(entry, aborted)

    async def canary(self, instance: Instance, request: GenerateRequest) -> Generation:
        """Have this generator, and no other, generate a few tokens that check it. Raises SlotLost, Late, Refused, or
        NotTaken when it gave the request away."""
        entry, aborted = self._in_flight.open(request, is_canary=True), True
        try:
            self._in_flight.note_instance(entry, instance)
            self._dispatch.send(entry)
            generation = await asyncio.wait_for(asyncio.shield(entry.completion), self._deadlines.command_s)
            if entry.instance != instance or generation.finish_reason == "abort":
                raise NotTaken(f"{self.describe(instance)} has not generated {request.id} itself")
            aborted = False
            return generation
        except TimeoutError:
            self._dispatch.abort(entry)
            waited = said(self._deadlines.command_s)
            raise Late(f"{self.describe(instance)} did not generate {request.id} within {waited}") from None
        except asyncio.CancelledError:
            self._dispatch.abort(entry)
            raise
        finally:
            self._in_flight.close(entry, aborted)

    async def digest_weights(self, instance: Instance) -> LiveDigest:
        """Return the digests of the generator's weights as they are in its memory. Raises SlotLost, Late or Refused."""
        reply = await self.ask(instance, DigestWeights())
        if not isinstance(reply, WeightDigests):
            raise Refused(f"{self.describe(instance)} replied to DigestWeights with {type(reply).__name__}")
        return reply.live

    async def dismiss(self, instance: Instance, timeout_s: float | None = None) -> None:
        """Have the instance generate no more, once what it has has left or ended. timeout_s: for that; None: the run's
        patience. Raises Late, Refused or SlotLost."""
        self.drain(instance)
        limit_s = self._deadlines.patience_s if timeout_s is None else timeout_s
        try:
            await self._in_flight.gone_from(instance, limit_s)
        except TimeoutError:
            left = len(self._in_flight.at(instance))
            described = self.describe(instance)
            waited = said(limit_s)
            raise Late(f"{described} still had {left} requests after {waited}, and cannot leave") from None
        await self.release(instance)
        self._in_flight.forget(instance)

    async def migrate(self, migrations: Sequence[Migration]) -> tuple[MigrationResult, ...]:
        """Returns one result a migration, in their order. Migrations go on to their end when the caller is cancelled.

        Raises Late when they could not begin, as a version was going live.
        """
        return await finish(self._migrate(migrations))

    def unfinished(self) -> tuple[Unfinished, ...]:
        """Return the requests in flight, as policies see them; `Unfinished.id` is what `migrate` understands."""
        return self._in_flight.unfinished()

    def lengths(self) -> Lengths:
        """Return the lengths of the latest completions."""
        return self._in_flight.completion_lengths.lengths()

    async def _send(
        self, entry: InFlight, lost: Collection[Instance], unwilling: Collection[Instance], versions: range
    ) -> None:
        there = await self.some(f"request {entry.name}", lost, versions)
        instances = [instance for instance in there if instance not in unwilling] or there
        request, loads = entry.request, self._in_flight.loads(instances)
        chosen = route(request.group, loads, len(request.prompt), self._block_tokens).instance
        self._in_flight.note_instance(entry, next(each for each in instances if each.id == chosen))
        self._dispatch.send(entry)

    async def _wait_for(self, entry: InFlight) -> Generation:
        limit_s = self._deadlines.progress_s
        seen, num_looks = self._in_flight.progress_at_s(entry), 0
        while not entry.completion.done():
            await asyncio.wait([entry.completion], timeout=limit_s / NUM_LOOKS)
            progress_at_s = self._in_flight.progress_at_s(entry)
            num_looks = num_looks + 1 if progress_at_s == seen else 0
            seen = progress_at_s
            if num_looks >= NUM_LOOKS and entry.instance is not None and not entry.completion.done():
                self._kill(entry.instance, entry.request.id, limit_s)
        return entry.completion.result()

    def _not_taken_s(self, entry: InFlight) -> float:
        """Return more and more seconds, as long as nobody takes the request."""
        return min(max(NOT_TAKEN_S, self._in_flight.not_taken_for_s(entry) / 4), MOST_NOT_TAKEN_S)

    def _kill(self, instance: Instance, request: str, limit_s: float) -> NoReturn:
        """Give up a generator that makes no progress. Raises SlotLost; Late for one that cannot be given up, as
        `leave_behind` has it. A server only loses what it has, and is asked last from now on: whether it is at an end,
        its fleet decides."""
        stuck = f"{self.describe(instance)} made no progress for {said(limit_s)} while it had to generate {request}"
        port = self._ports.get(instance.id)
        if port is not None:
            if port.is_needed:
                raise Late(stuck)
            if not instance.slots:
                self.suspect(instance.id, stuck)
                port.condemn(stuck)
                raise _Stuck(stuck)
            self.put_aside(instance.id, stuck)
        raise SlotLost(self.why_lost(instance) or stuck)

    def _begin_again(self, entry: InFlight, error: Failure) -> None:
        """Have a request that failed with `error` go to a generator again. Raises the error if it must not."""
        if not error.retryable:
            raise error
        lost, failed = entry.where, not isinstance(error, NotTaken)
        if isinstance(error, Interrupted) and not isinstance(error, _Stuck) and len(self.instances) < 2:
            raise error  # there is no other one, and this one would fail at it again
        if failed:
            if entry.num_lost + 1 == MOST_LOST:
                why = f"{error}; {MOST_LOST} generators were lost while they had {entry.request.id}"
                raise SlotLost(why) from error
        elif self._in_flight.not_taken_for_s(entry) > self._deadlines.patience_s:
            raise error
        is_first = entry.not_taken_since_s is None
        self._in_flight.reopen(entry, failed=failed)
        if is_first or failed:
            what = "goes on elsewhere" if entry.request.generated else "begins again"
            self.on_restarted(f"Request {entry.request.id} {what}: {error}.", lost)

    async def _migrate(self, migrations: Sequence[Migration]) -> tuple[MigrationResult, ...]:
        async with self.lock.shared(f"{len(migrations)} requests change generators"):
            return await Migrator(self, self._in_flight, self._dispatch, self._block_tokens).run(migrations)

    def on_event(self, instance: Instance, event: InstanceEvent) -> None:
        match event:
            case Finished(generations):
                for generation in self._in_flight.note_completions(instance, generations):
                    self.on_ended(instance.id, None, 0.0)
                    self.on_finished(generation)
            case EngineStats():
                self._in_flight.note_stats(instance, event)
            case Heartbeat(what) if what in OTHER_WORK:
                self._in_flight.note_other_work(instance)
            case Returned(request, failure):
                if (entry := self._in_flight.get(request.id)) and entry.instance == instance:
                    entry.take(request)
                    entry.fail(failure)
            case Died(reason):
                self._in_flight.forget(instance)
                for entry in self._in_flight.at(instance):
                    if not entry.migrating:
                        entry.fail(SlotLost(reason))
            case _:
                pass
