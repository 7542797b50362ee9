"""The transaction by which servers get a version of the weights: one at a time, and all or nothing at each of them.

Each attempt (`fleet.updates.update_attempt`) has one outcome for each server. The live set is an input, decided while
nothing is under way. What failed is looked at before it is judged (`core.instances.update_outcomes`): those that are
not at fault are sent it again, in a new epoch and from bucket 0.

A server that joins gets the live version by the same steps (`warm`); a version that is published meanwhile goes first.
"""

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ductile.core.instances.instances import InstanceId
from ductile.core.instances.update_outcomes import InstanceOutcome, next_attempt
from ductile.core.rollouts.provenance import KnownWeights
from ductile.fleet.updates.update_attempt import UpdateAttempt
from ductile.fleet.updates.update_parties import AnyServer, Senders, UpdateOptions, UpdateResult
from ductile.messages.updates import Digest, ServerState, WeightCarrier
from ductile.roles import Failure, Refused, SlotLost

WORTH = 0.1
"""Share of unchanged bytes from which on it pays to look for them before a version is sent: ranks read all of their
weights once more for it, while nothing is trained. A model that is trained whole has hardly any, one with frozen
tensors has."""


class WeightUpdates:
    """The updates of a run, one at a time."""

    def __init__(
        self,
        trainer: Senders,
        options: UpdateOptions,
        choose: Callable[[ServerState, WeightCarrier | None], WeightCarrier],
        next_epoch: Callable[[int], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """choose: the carrier for a server, the second argument where only one is possible; raises Refused where there
        is none. next_epoch: an epoch of the fleet's membership that is newer than any before; it is given the newest
        that the servers have seen, and raises Late when that is another fleet's."""
        self.known: KnownWeights | None = None
        """Version that was committed last; None before the first."""
        self.under_way = ""
        """Work at the moment: "version 3", "server-1 joins"; "" when nothing is."""
        self._trainer, self._options, self._choose = trainer, options, choose
        self._next_epoch, self._clock = next_epoch, clock
        self._turn = asyncio.Lock()
        self._warming: asyncio.Task[UpdateResult | None] | None = None
        self._share_equal = 0.0
        """Share of the last version's bytes that were those of the version before it."""
        self._num_due = 0
        """Versions that wait for what is under way, or are under way: they go before servers that join."""
        self._attempt: UpdateAttempt | None = None

    @property
    def version(self) -> int | None:
        return self.known.version if self.known else None

    @property
    def digest(self) -> Digest:
        return self.known.digest if self.known else ""

    def leave_out(self, server: InstanceId, why: str) -> None:
        """Wait no more for a server that is known to be gone, if it is among those that get a version just now."""
        if self._attempt is not None:
            self._attempt.fail(server, SlotLost(why))

    async def update(self, version: int, servers: Sequence[AnyServer]) -> UpdateResult:
        """Bring the trainer's weights, which are this version, to all servers. One outcome for each. Raises what the
        trainer's ranks raise before any has it: then the servers have what they had, and have been told to abort.

        A joiner that is being given the version before is left to the caller, who makes it a receiver of this one."""
        with self.before_joiners():
            async with self._turn:
                self.under_way = f"version {version}"
                try:
                    base = self.known if self.digest and self._share_equal >= WORTH else None
                    most = self._options.max_attempts
                    result = await self._attempts(self._trainer, version, servers, most, base=base)
                    self._note(result)
                    self._share_equal = result.share_equal
                    return result
                finally:
                    self.under_way = ""

    @contextmanager
    def before_joiners(self) -> Generator[None]:
        """Give nothing to servers that join meanwhile, from before the receivers of a version are looked for."""
        if self._warming is not None:
            self._warming.cancel()
        self._num_due += 1
        try:
            yield
        finally:
            self._num_due -= 1

    async def warm(self, server: AnyServer, version: int, sources: Sequence[Senders]) -> UpdateResult | None:
        """Bring the live version to a server that joins, from the first source that can give it. It has committed when
        its digest is that of the version. None when another version is published meanwhile, or was sent to servers and
        goes live in a moment, or when those that have it cannot send it now: it is to be asked again. Raises Refused
        when the server does not take it, or no source sends as it is to be sent.
        """
        async with self._turn:
            if self._num_due or self.version not in (None, version):
                return None
            self.under_way = f"{server.id} joins"
            self._warming = asyncio.create_task(self._warm(server, version, sources))
            try:
                await asyncio.wait([self._warming])
                return None if self._warming.cancelled() else self._warming.result()
            finally:
                self._warming.cancel()
                await asyncio.gather(self._warming, return_exceptions=True)
                self._warming, self.under_way = None, ""

    async def _warm(self, server: AnyServer, version: int, sources: Sequence[Senders]) -> UpdateResult | None:
        expected = self.digest if self.version == version else ""
        failures, others, only = list[str](), list[str](), self._options.join_carrier
        is_unsent = False
        for source in sources:
            if only is not None and source.carrier not in (None, only):
                others.append(f"who has it sends by {source.carrier}, and inference.join_transport is {only!r}")
                continue
            try:
                result = await self._attempts(source, version, [server], 1, source.carrier or only)
            except Refused:
                is_unsent = True
                continue
            if result.unsent:
                is_unsent = True  # such as by a trainer that has gone on: that is no fault of who asks
                continue
            if result.committed and expected and result.digest != expected:
                failures.append(f"it was given {result.digest}, and version {version} is {expected}")
                continue
            if result.committed:
                self._note(result)
                return result
            failures.append(result.outcomes[0].reason)
            if result.outcomes[0].outcome == "dead":
                return result
        if is_unsent and not failures:
            return None
        raise Refused(f"{server.id} cannot be given version {version}: {'; '.join([*others, *failures])}")

    async def _attempts(
        self,
        senders: Senders,
        version: int,
        servers: Sequence[AnyServer],
        max_attempts: int,
        only: WeightCarrier | None = None,
        base: KnownWeights | None = None,
    ) -> UpdateResult:
        """Attempt to bring a version to servers until each has an outcome. only: the one carrier that may be chosen.
        base: as `UpdateAttempt` has it."""
        began_s = self._clock()
        attempts, outcomes = list[UpdateAttempt](), list[InstanceOutcome]()
        left: dict[InstanceId, AnyServer] = {server.id: server for server in servers}
        while left:
            attempt = self._attempt = UpdateAttempt(
                senders,
                version,
                left,
                self._options,
                choose=lambda state: self._choose(state, only),
                next_epoch=self._next_epoch,
                clock=self._clock,
                base=base,
            )
            attempts.append(attempt)
            try:
                await attempt.run()
            except Failure as error:
                if not any(each.outcome == "committed" for each in outcomes):
                    raise
                for name in left:  # some have it from an attempt before: it is a version, and goes live there
                    attempt.fail(name, str(error))
                max_attempts = len(attempts)
            finally:
                self._attempt = None
            decision = next_attempt(tuple(attempt.committed), attempt.short, len(attempts), max_attempts)
            outcomes += decision.ended
            left = {name: replace(left[name], incarnation=attempt.incarnation(name)) for name in decision.again}
        return _result_of(version, attempts, outcomes, self._clock() - began_s)

    def _note(self, result: UpdateResult) -> None:
        """Note the version that was brought. One more update to the same one, which reached nobody or came from a
        server, says nothing new of it."""
        if result.version != self.version or (result.digest and not self.digest):
            self.known = KnownWeights(result.version, result.digest, result.tensors)


def _result_of(
    version: int, attempts: Sequence[UpdateAttempt], outcomes: Sequence[InstanceOutcome], seconds: float
) -> UpdateResult:
    """Return the result of a version from all attempts to bring it. Its digest is known from one that a server has
    committed in: in another one the ranks may have been stopped before they had all of it."""
    committed = [attempt for attempt in attempts if attempt.committed]
    return UpdateResult(
        version=version,
        digest=committed[-1].digest if committed else "",
        outcomes=tuple(outcomes),
        attempts=len(attempts),
        seconds=seconds,
        pause_s=max((attempt.pause_s for attempt in attempts), default=0.0),
        num_bytes=sum(attempt.num_bytes for attempt in attempts),
        carriers={name: carrier for attempt in attempts for name, carrier in attempt.carriers.items()},
        tensors=committed[-1].tensors if committed else {},
        num_bytes_unchanged=sum(attempt.num_bytes_unchanged for attempt in attempts),
        share_equal=max((attempt.share_equal for attempt in attempts), default=0.0),
        unsent=attempts[-1].unsent if attempts else "",
    )
