"""The transaction by which servers get a version of the weights: one at a time, and all or nothing at each of them.

Each attempt (`ductile.fleet.update_attempt`) has one outcome for each server. The live set is an input, decided while
nothing is under way. What failed is looked at before it is judged (`core.instances.update_outcomes`): those that are
not at fault are sent it again, in a new epoch and from bucket 0.

A server that joins gets the live version by the same steps (`warm`); a version that is published meanwhile goes first.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ductile.core.instances.instances import InstanceId
from ductile.core.instances.update_outcomes import InstanceOutcome, next_attempt
from ductile.fleet.update_attempt import UpdateAttempt
from ductile.fleet.update_parties import AnyMember, Senders, UpdateOptions, UpdateResult
from ductile.messages.updates import Digest, ServerState, WeightCarrier
from ductile.roles import Refused, SlotLost


class WeightUpdates:
    """The updates of a run, one at a time."""

    def __init__(
        self,
        trainer: Senders,
        options: UpdateOptions,
        choose: Callable[[ServerState], WeightCarrier],
        next_epoch: Callable[[int], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """choose: the carrier for a server; raises Refused where there is none. next_epoch: an epoch of the fleet's
        membership that is newer than any before, and than the one that it is given."""
        self.version: int | None = None
        """Version that was committed last; None before the first."""
        self.digest: Digest = ""
        """The digest of that version."""
        self.under_way = ""
        """What is done at the moment: "version 3", "server-1 joins"; "" when nothing is."""
        self._trainer, self._options, self._choose = trainer, options, choose
        self._next_epoch, self._clock = next_epoch, clock
        self._turn = asyncio.Lock()
        self._warming: asyncio.Task[UpdateResult] | None = None
        self._attempt: UpdateAttempt | None = None

    def leave_out(self, server: InstanceId, why: str) -> None:
        """Wait no more for a server that is known to be gone, if it is among those that get a version just now."""
        if self._attempt is not None:
            self._attempt.fail(server, SlotLost(why))

    async def update(self, version: int, members: Sequence[AnyMember]) -> UpdateResult:
        """Bring the trainer's weights, which are this version, to all members. One outcome for each. Raises what the
        trainer's ranks raise: then the servers have what they had, and have been told to abort.

        A joiner that is being given the version before is left to the caller, who makes it a member of this one."""
        if self._warming is not None:
            self._warming.cancel()
        async with self._turn:
            self.under_way = f"version {version}"
            try:
                result = await self._transaction(self._trainer, version, members, self._options.max_attempts)
            finally:
                self.under_way = ""
            known = self.digest if self.version == version else ""  # it may be sent again to those that lack it
            self.version, self.digest = version, result.digest or known
            return result

    async def warm(self, member: AnyMember, version: int, sources: Sequence[Senders]) -> UpdateResult | None:
        """Bring the live version to a server that joins, from the first source that can give it. It has committed when
        its digest is that of the version. None when a version is published meanwhile: it is to be asked again. Raises
        Refused when no source can give it.
        """
        async with self._turn:
            self.under_way = f"{member.id} joins"
            self._warming = asyncio.create_task(self._warm(member, version, sources))
            try:
                await asyncio.wait([self._warming])
                return None if self._warming.cancelled() else self._warming.result()
            finally:
                self._warming.cancel()
                await asyncio.gather(self._warming, return_exceptions=True)
                self._warming, self.under_way = None, ""

    async def _warm(self, member: AnyMember, version: int, sources: Sequence[Senders]) -> UpdateResult:
        expected = self.digest if self.version == version else ""
        failures, asked = list[str](), self._options.join_carrier
        for source in sources:
            if asked is not None and source.carrier not in (None, asked):
                continue  # another way was asked for
            try:
                result = await self._transaction(source, version, [member], 1)
            except Refused as error:
                failures.append(str(error))
                continue
            if result.committed and expected and result.digest != expected:
                failures.append(f"it was given {result.digest}, and version {version} is {expected}")
                continue
            if result.committed:
                self.version, self.digest = version, result.digest
                return result
            failures.append(result.outcomes[0].reason)
            if result.outcomes[0].outcome == "dead":
                return result
        raise Refused(f"{member.id} cannot be given version {version}: {'; '.join(failures)}")

    async def _transaction(
        self, senders: Senders, version: int, members: Sequence[AnyMember], max_attempts: int
    ) -> UpdateResult:
        with senders.keeping(version):
            return await self._attempts(senders, version, members, max_attempts)

    async def _attempts(
        self, senders: Senders, version: int, members: Sequence[AnyMember], max_attempts: int
    ) -> UpdateResult:
        began_s, number = self._clock(), 0
        outcomes, carriers = list[InstanceOutcome](), dict[InstanceId, WeightCarrier]()
        digest, num_bytes, pause_s, tensors = "", 0, 0.0, dict[str, Digest]()
        left: dict[InstanceId, AnyMember] = {member.id: member for member in members}
        only = senders.carrier or (self._options.join_carrier if self._warming else None)

        def choose(state: ServerState) -> WeightCarrier:
            return only or self._choose(state)

        while left:
            number += 1
            attempt = UpdateAttempt(senders, version, left, self._options, choose, self._next_epoch, self._clock)
            self._attempt = attempt
            try:
                await attempt.run()
            finally:
                self._attempt = None
            carriers |= attempt.carriers
            if attempt.committed:  # else the ranks may have been stopped before they had all of it
                digest, tensors = attempt.digest, {**attempt.tensors}
            num_bytes += attempt.num_bytes
            pause_s = max(pause_s, attempt.pause_s)
            decision = next_attempt(tuple(attempt.committed), attempt.short, number, max_attempts)
            outcomes += decision.ended
            left = {name: replace(left[name], incarnation=attempt.incarnation(name)) for name in decision.again}
        seconds = self._clock() - began_s
        return UpdateResult(version, digest, tuple(outcomes), number, seconds, pause_s, num_bytes, carriers, tensors)
