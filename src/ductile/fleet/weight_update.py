"""The transaction by which servers get a version of the weights: one at a time, and all or nothing at each of them.

    look      every server's state: incarnation, host, carriers      (who is not there is out before it begins)
    begin     the trainer's ranks say what they will send            BeginUpdate -> offers
    prepare   every server stages it beside the weights that it has  PrepareUpdate
    send      the bytes go from ranks to servers                     until all ranks have reported, servers watched
    verify    a server's digest is the sum of the ranks' parts
    commit    pause, change over, resume: each server by itself      a reply that is lost is asked for, not sent again
    finish    the ranks may change the weights again; who has not committed is told to abort

The live set is an input, decided while nothing is under way. What failed is looked at before it is judged
(`core.instances.update_outcomes`): those that are not at fault are sent it again, in a new epoch and from bucket 0.
Nothing here waits without an end, and nobody waits for a server that is gone.

A server that joins gets the live version by the same steps (`warm`); a version that is published meanwhile goes first.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar
from uuid import uuid4

from ductile.concurrency.background import finish
from ductile.concurrency.structured import gather_all
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.update_outcomes import InstanceOutcome, Shortfall, next_attempt
from ductile.fleet.update_parties import AnyMember, Senders, UpdateOptions, UpdateResult, shortfall
from ductile.messages.updates import (
    Digest,
    EndUpdate,
    Offer,
    PauseServer,
    PrepareUpdate,
    Receiver,
    ResumeServer,
    ServerState,
    UpdateProgress,
    WeightCarrier,
    WeightUpdate,
    total_of,
)
from ductile.roles import Failure, Interrupted, Late, Refused, SlotLost

T = TypeVar("T")

WATCH_S = 0.2
"""Seconds between two looks at servers while bytes go to them."""
NUM_ASKED = 3
"""Times that a server is asked what has become of a commit whose reply was lost."""


@dataclass(slots=True)
class _Attempt:
    """What is known of one attempt so far."""

    update: WeightUpdate
    members: Mapping[InstanceId, AnyMember]
    states: Mapping[InstanceId, ServerState]
    short: dict[InstanceId, Shortfall] = field(default_factory=dict[InstanceId, Shortfall])
    prepared: list[InstanceId] = field(default_factory=list[InstanceId])
    committed: list[InstanceId] = field(default_factory=list[InstanceId])
    receiving: set[InstanceId] = field(default_factory=set[InstanceId])
    """Servers that have been seen with a bucket: the ranks notice by themselves when these fail."""
    is_sent: bool = False
    """All servers were prepared, so that the ranks could send to them."""
    digest: Digest = ""
    num_bytes: int = 0
    pause_s: float = 0.0

    @property
    def left(self) -> list[InstanceId]:
        """Servers that have not failed."""
        return [name for name in self.members if name not in self.short]

    def fail(self, name: InstanceId, error: Failure | str) -> None:
        self.short.setdefault(name, shortfall(error))

    @property
    def is_broken(self) -> bool:
        """Nobody is left, or one has failed that holds the others up: a process group lacks it, or the ranks would wait
        for it to come."""
        carriers = {InstanceId(each.instance): each.carrier for each in self.update.receivers}
        failed = [(carriers[name], name in self.receiving) for name in self.short if name in carriers]
        awaited = [carrier == "shared_memory" and not began for carrier, began in failed]
        return not self.left or any(awaited) or any(carrier == "point_to_point" for carrier, _ in failed)

    def end(self, version: int = 0) -> EndUpdate:
        return EndUpdate(self.update.update_id, self.update.epoch, version or self.update.version, self.digest)


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
            self.version, self.digest = version, result.digest
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
        failures = list[str]()
        for source in sources:
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
        digest, num_bytes, pause_s = "", 0, 0.0
        left = {member.id: member for member in members}
        while left:
            attempt = await self._attempt(senders, version, left)
            drops = any(why.fault not in ("undone", "held_up") for why in attempt.short.values())
            if attempt.is_sent or not drops:  # else nothing has gone out, and there are fewer the next time
                number += 1
            carriers |= {InstanceId(each.instance): each.carrier for each in attempt.update.receivers}
            if attempt.committed:  # else the ranks may have been stopped before they had all of it
                digest = attempt.digest
            num_bytes += attempt.num_bytes
            pause_s = max(pause_s, attempt.pause_s)
            decision = next_attempt(tuple(attempt.committed), attempt.short, max(1, number), max_attempts)
            outcomes += decision.ended
            left = {name: replace(left[name], incarnation=attempt.states[name].incarnation) for name in decision.again}
        seconds = self._clock() - began_s
        return UpdateResult(version, digest, tuple(outcomes), number, seconds, pause_s, num_bytes, carriers)

    async def _attempt(self, senders: Senders, version: int, members: Mapping[InstanceId, AnyMember]) -> _Attempt:
        """Send the version to all members once. What has become of each is in the attempt."""
        states, absent = await self._look(members)
        carriers = self._carriers(senders, states, absent)
        update = self._decide(version, members, states, carriers)
        attempt = _Attempt(update, members, states, short=absent)
        is_begun = False
        try:
            if attempt.left:
                try:
                    is_begun = True
                    async with asyncio.timeout(self._options.total_timeout_s):
                        offers = await senders.begin_update(update)
                        await self._prepare(attempt, offers)
                        await self._send(attempt, senders)
                        await self._verify(attempt)
                except TimeoutError:
                    for name in attempt.left:
                        attempt.fail(name, f"the update was not through after {self._options.total_timeout_s:g} s")
                except Refused as error:
                    for name in attempt.left:
                        attempt.fail(name, f"the weights could not be sent: {error}")
                await finish(self._commit_all(attempt))
        finally:
            await finish(self._end(attempt, senders, is_begun))
        await self._judge(attempt)
        return attempt

    async def _look(
        self, members: Mapping[InstanceId, AnyMember]
    ) -> tuple[dict[InstanceId, ServerState], dict[InstanceId, Shortfall]]:
        """Ask all for their state. Those that are not what they were are absent."""
        states, absent = dict[InstanceId, ServerState](), dict[InstanceId, Shortfall]()
        replies = await gather_all(*(_outcome(member.control.state()) for member in members.values()))
        for member, reply in zip(members.values(), replies, strict=True):
            if isinstance(reply, Failure):
                absent[member.id] = shortfall(reply)
            elif why := _restarted(member, reply):
                absent[member.id] = why
            else:
                states[member.id] = reply
        return states, absent

    def _carriers(
        self, senders: Senders, states: Mapping[InstanceId, ServerState], absent: dict[InstanceId, Shortfall]
    ) -> dict[InstanceId, WeightCarrier]:
        """Choose a carrier for each server. One for which there is none is absent."""
        only = senders.carrier or (self._options.join_carrier if self._warming else None)
        chosen = dict[InstanceId, WeightCarrier]()
        for name, state in states.items():
            try:
                chosen[name] = only or self._choose(state)
            except Refused as error:
                absent[name] = shortfall(error)
        return chosen

    def _decide(
        self,
        version: int,
        members: Mapping[InstanceId, AnyMember],
        states: Mapping[InstanceId, ServerState],
        carriers: Mapping[InstanceId, WeightCarrier],
    ) -> WeightUpdate:
        """The decision that all ranks and servers get."""
        options, update_id = self._options, uuid4().hex
        receivers = tuple(
            Receiver(name, carrier, members[name].url, members[name].token) for name, carrier in carriers.items()
        )
        # A server may have been in the fleet of a run that has ended.
        epoch = self._next_epoch(max((state.epoch for state in states.values()), default=0))
        return WeightUpdate(
            update_id=update_id,
            epoch=epoch,
            version=version,
            receivers=receivers,
            bucket_bytes=options.bucket_bytes,
            num_slots=options.num_slots,
            bucket_timeout_s=options.bucket_timeout_s,
            total_timeout_s=options.total_timeout_s,
            verify=options.verify,
            folder=options.folder,
        )

    async def _prepare(self, attempt: _Attempt, offers: Sequence[Offer]) -> None:
        carriers: dict[str, WeightCarrier] = {each.instance: each.carrier for each in attempt.update.receivers}

        async def ask(name: InstanceId) -> None:
            attempt.prepared.append(name)  # also one whose reply is lost has something to abort
            prepare = PrepareUpdate(attempt.update, carriers[name], tuple(offers), instance=name)
            _note(attempt, name, await _outcome(attempt.members[name].control.prepare(prepare)))

        await gather_all(*map(ask, attempt.left))

    async def _send(self, attempt: _Attempt, senders: Senders) -> None:
        """Wait for the ranks and watch the servers; what fails first counts, and nobody waits for the rest."""
        if attempt.is_broken:
            return self._break(attempt)
        attempt.is_sent = True
        sending = asyncio.create_task(_awaited(senders.sent(attempt.update.update_id)))
        watching = asyncio.create_task(self._watch(attempt))
        try:
            await asyncio.wait([sending, watching], return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                return self._break(attempt)
            reports = sending.result()
        finally:
            for task in (sending, watching):
                task.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
        attempt.num_bytes = sum(report.num_bytes for report in reports)
        for report in reports:
            for name, why in report.failed.items():
                attempt.fail(InstanceId(name), f"{report.sender}: {why}")
        if attempt.update.verify != "none":
            attempt.digest = total_of(report.digest for report in reports)

    def _break(self, attempt: _Attempt) -> None:
        """One is missing that the others cannot do without: they are not at fault."""
        why = f"the update was broken off, as {', '.join(attempt.short)} failed"
        for name in attempt.left:
            attempt.short[name] = Shortfall("held_up", why)

    async def _watch(self, attempt: _Attempt) -> None:
        """Returns when it is of no use to go on sending."""
        while not attempt.is_broken:
            await asyncio.sleep(WATCH_S)

            async def look(name: InstanceId) -> None:
                reply = await _outcome(attempt.members[name].control.state())
                if isinstance(reply, SlotLost):
                    attempt.fail(name, reply)
                elif isinstance(reply, ServerState):
                    if reply.incarnation != attempt.states[name].incarnation:
                        attempt.short.setdefault(name, _other_process(name))
                    elif (progress := reply.update) and progress.update_id == attempt.update.update_id:
                        _note(attempt, name, progress)

            await gather_all(*map(look, attempt.left))

    async def _verify(self, attempt: _Attempt) -> None:
        end = attempt.end()

        async def ask(name: InstanceId) -> None:
            _note(attempt, name, await _outcome(attempt.members[name].control.verify(end)))

        await gather_all(*map(ask, attempt.left))

    async def _commit_all(self, attempt: _Attempt) -> None:
        await gather_all(*(self._commit(attempt, name) for name in attempt.left))

    async def _commit(self, attempt: _Attempt, name: InstanceId) -> None:
        """Change a server over while nothing is sampled there, by any client. It goes on only when it has committed;
        else its lease ends the pause, and nothing is asked of it by then."""
        options, control = self._options, attempt.members[name].control
        pause = PauseServer(attempt.update.epoch, options.pause_mode, options.pause_lease_s)
        began_s = self._clock()
        try:
            await control.pause(pause)
            reply = await _outcome(control.commit(attempt.end()))
            if isinstance(reply, SlotLost | Late | Interrupted):
                reply = await self._ask_what_came_of(attempt, name, reply)
            _note(attempt, name, reply)
            if name not in attempt.short:
                attempt.committed.append(name)
        except Failure as error:
            attempt.fail(name, error)
        finally:
            if name in attempt.committed:
                with suppress(Failure):  # the lease ends it then
                    await control.resume(ResumeServer(pause.epoch))
                attempt.pause_s = max(attempt.pause_s, self._clock() - began_s)

    async def _ask_what_came_of(self, attempt: _Attempt, name: InstanceId, lost: Failure) -> "UpdateProgress | Failure":
        """The reply to a commit was lost: the server's state says whether it was done. Only when it says that it was
        not is the commit sent once more."""
        control, state = attempt.members[name].control, None
        for _ in range(NUM_ASKED):
            state = await _outcome(control.state())
            if not isinstance(state, Late):
                break
        if not isinstance(state, ServerState):
            return state or lost
        if state.incarnation != attempt.states[name].incarnation:
            return SlotLost(_other_process(name).reason)
        if state.version == attempt.update.version and attempt.digest in ("", state.digest):
            return UpdateProgress(attempt.update.update_id, "committed", digest=state.digest)
        return await _outcome(control.commit(attempt.end()))

    async def _end(self, attempt: _Attempt, senders: Senders, is_begun: bool) -> None:
        """Have those abort that have not committed, and the ranks go on."""
        aborted = [name for name in attempt.prepared if name not in attempt.committed]
        gone = {name for name, why in attempt.short.items() if why.fault in ("gone", "restarted")}

        async def abort(name: InstanceId) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.probe_timeout_s):
                    await _outcome(attempt.members[name].control.abort(attempt.end()))

        ending = [abort(name) for name in aborted if name not in gone]
        if is_begun:
            ending.append(_awaited(senders.finish_update(attempt.update.update_id, not attempt.committed)))
        await gather_all(*ending)

    async def _judge(self, attempt: _Attempt) -> None:
        """Look at those that failed without being at fault as far as is known: they may be gone, hang, or be others. Of
        those in a group, which all fail together, it is the ones with the fewest buckets that have held the others up.
        """
        unclear = [name for name, why in attempt.short.items() if why.fault in ("undone", "refused")]
        states, absent = await self._look(
            {
                name: replace(attempt.members[name], incarnation=attempt.states[name].incarnation)
                for name in unclear
                if name in attempt.states
            }
        )
        for name, why in absent.items():
            attempt.short[name] = Shortfall(why.fault, f"{attempt.short[name].reason}; {why.reason}")
        by_group = {each.instance for each in attempt.update.receivers if each.carrier == "point_to_point"}
        loaded = {
            name: progress.num_buckets
            for name, state in states.items()
            if name in by_group
            and attempt.short[name].fault == "undone"
            and (progress := state.update)
            and progress.update_id == attempt.update.update_id
        }
        for name, num_buckets in loaded.items():
            if num_buckets > min(loaded.values()) or by_group.intersection(absent):
                attempt.short[name] = Shortfall("held_up", attempt.short[name].reason)


def _note(attempt: _Attempt, name: InstanceId, reply: "UpdateProgress | Failure") -> None:
    if isinstance(reply, Failure):
        attempt.fail(name, reply)
    elif reply.phase in ("failed", "aborted"):
        attempt.fail(name, reply.reason or f"the update has {reply.phase}")
    elif reply.num_buckets:
        attempt.receiving.add(name)


def _restarted(member: AnyMember, state: ServerState) -> Shortfall | None:
    return _other_process(member.id) if member.incarnation not in ("", state.incarnation) else None


def _other_process(name: InstanceId) -> Shortfall:
    return Shortfall("restarted", f"{name} was started anew: another process answers at its address")


async def _outcome(call: Awaitable[T]) -> T | Failure:
    try:
        return await call
    except Failure as error:
        return error


async def _awaited(call: Awaitable[T]) -> T:
    return await call
