"""One attempt to bring a version to servers.

    look      every server's state: incarnation, host, carriers      (who is not there is out before it begins)
    begin     the trainer's ranks say what they will send            BeginUpdate -> offers
    prepare   every server stages it beside the weights that it has  PrepareUpdate
    send      the bytes go from ranks to servers                     until all ranks have reported, servers watched
    verify    a server's digest is the sum of the ranks' parts         each server by itself, from here on
    commit    pause, change over, resume                               a reply that is lost is asked for, not sent again
    finish    the ranks may change the weights again; who has not committed is told to abort
    review    those that have failed are asked once more: they may be gone, or have held the others up

One that fails, at whatever point, is out at once: nothing of it is waited for any more, and the ranks are told
(`Senders.leave_out`), so that they send to the others without it. Nothing here waits without an end.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar
from uuid import uuid4

from msgspec.structs import replace as replaced

from ductile.concurrency.background import finish, start
from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.deadline import said
from ductile.concurrency.structured import gather_all
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.update_outcomes import Shortfall
from ductile.core.rollouts.provenance import KnownWeights
from ductile.fleet.updates.update_parties import AnyServer, Senders, UpdateOptions, shortfall, summed_by_name
from ductile.messages.updates import (
    Digest,
    EndUpdate,
    Offer,
    PauseServer,
    PrepareUpdate,
    Receiver,
    ResumeServer,
    SendReport,
    ServerState,
    UpdateProgress,
    WeightCarrier,
    WeightUpdate,
    total_of,
)
from ductile.roles import Failure, Interrupted, Late, Refused, SlotLost

T = TypeVar("T")

WATCH_S = 0.2
"""Seconds between two looks at a server while bytes go to it."""
NUM_ASKED = 3
"""Times that a server is asked what has become of a verify or a commit whose reply was lost."""
DIGEST_BYTES_PER_S = 1 << 30
"""A server that reads what it has staged more slowly than this is late."""


class UpdateAttempt:
    """`run` it once; what has become of each server is in it then."""

    def __init__(
        self,
        senders: Senders,
        version: int,
        servers: Mapping[InstanceId, AnyServer],
        options: UpdateOptions,
        choose: Callable[[ServerState], WeightCarrier],
        next_epoch: Callable[[int], int],
        clock: Callable[[], float],
        base: KnownWeights | None = None,
    ) -> None:
        """base: the version before, where what has not changed since then may be left out; that is so when all servers
        have it. choose, next_epoch: as `ductile.fleet.updates.weight_update.WeightUpdates` has them."""
        self.short: dict[InstanceId, Shortfall] = {}
        """Servers that have not committed, and will not."""
        self.committed: list[InstanceId] = []
        self.carriers: dict[InstanceId, WeightCarrier] = {}
        self.digest: Digest = ""
        """The version's; "" where nobody staged it, or nothing is verified."""
        self.tensors: dict[str, Digest] = {}
        """Parts of the digest, by the tensors' names."""
        self.num_bytes = self.num_bytes_unchanged = 0
        self.share_equal = 0.0
        """Share of the version's bytes that are those of the version before."""
        self.unsent = ""
        """Reason for which the senders could not send it."""
        self.pause_s = 0.0
        """The longest that a server answered nobody."""
        self._senders, self._version, self._servers, self._options = senders, version, servers, options
        self._choose, self._next_epoch, self._clock, self._base = choose, next_epoch, clock, base
        self._states: dict[InstanceId, ServerState] = {}
        self._prepared: list[InstanceId] = []
        self._commits: list[asyncio.Task[None]] = []
        self._deadline_s = clock() + options.total_timeout_s
        self._changed = ChangeSignal()

    def incarnation(self, name: InstanceId) -> str:
        """Return the process that a server is: what it says now, or said before where it does not answer."""
        state = self._states.get(name)
        return state.incarnation if state else self._servers[name].incarnation

    def fail(self, name: InstanceId, error: Failure | Shortfall | str) -> None:
        """Take a server out of the attempt. Nothing happens when it has no part in it, is out already or has committed;
        but that it is gone is noted also where it is out because something was not done there."""
        why = error if isinstance(error, Shortfall) else shortfall(error)
        is_news = name not in self.short or (self.short[name].fault, why.fault) == ("undone", "gone")
        if name in self._servers and is_news and name not in self.committed:
            self.short[name] = why
            self._changed.notify_all()

    async def run(self) -> None:
        """Send the version to all servers once. Raises what the senders raise but Refused: then servers have what they
        had, and have been told to abort."""
        for name, found in (await self._ask_states(self._servers)).items():
            if isinstance(found, Shortfall):
                self.fail(name, found)
            else:
                self._states[name] = found
        self._choose_carriers()
        update = self._decide()
        if self._remaining:
            try:
                await self._prepare_and_send(update)
                await gather_all(*(self._verify_and_commit(update, name) for name in self._remaining))
            except BaseException:
                with suppress(Failure):  # it follows from what is raised here, such as a rank's death
                    await finish(self._finish_or_abort(update))
                raise
            await finish(self._finish_or_abort(update))
        await self._review_failed(update)

    async def _prepare_and_send(self, update: WeightUpdate) -> None:
        """Have the senders, whose weights stay what they are meanwhile, send it to all. What they cannot send by the
        update's deadline, nobody gets."""
        why = ""
        try:
            with self._senders.keeping(update.version):
                async with asyncio.timeout(self._options.total_timeout_s):
                    offers = await self._senders.begin_update(update)
                    async with self._leaving_out(update):
                        await self._prepare(update, offers)
                        await self._send(update)
        except TimeoutError:
            why = f"the update was not through after {self._options.total_timeout_s:g} s"
        except Refused as error:
            self.unsent = why = f"the weights could not be sent: {error}"
        for name in self._remaining if why else ():
            self.fail(name, why)

    @property
    def _remaining(self) -> list[InstanceId]:
        """Servers that have not failed."""
        return [name for name in self._servers if name not in self.short]

    async def _ask_states(self, servers: Mapping[InstanceId, AnyServer]) -> dict[InstanceId, ServerState | Shortfall]:
        """Ask all for their state. Those that are not what they were fall short."""
        replies = await gather_all(*(_outcome(server.control.state()) for server in servers.values()))
        found = dict[InstanceId, ServerState | Shortfall]()
        for server, reply in zip(servers.values(), replies, strict=True):
            if isinstance(reply, Failure):
                found[server.id] = shortfall(reply)
            elif server.incarnation not in ("", reply.incarnation):
                found[server.id] = _other_process(server.id)
            else:
                found[server.id] = reply
        return found

    def _choose_carriers(self) -> None:
        """Choose a carrier for each server. One for which there is none is out."""
        for name in self._remaining:
            try:
                self.carriers[name] = self._choose(self._states[name])
            except Refused as error:
                self.fail(name, error)

    def _decide(self) -> WeightUpdate:
        """Return the decision that all ranks and servers get."""
        options, servers = self._options, self._servers
        receivers = tuple(
            Receiver(name, carrier, servers[name].url, servers[name].token if carrier == "http" else "")
            for name, carrier in self.carriers.items()
        )
        epoch = self._next_epoch(max((state.epoch for state in self._states.values()), default=0))
        return WeightUpdate(
            update_id=uuid4().hex,
            epoch=epoch,
            version=self._version,
            receivers=receivers,
            bucket_bytes=options.bucket_bytes,
            num_slots=options.num_slots,
            bucket_timeout_s=options.bucket_timeout_s,
            total_timeout_s=options.total_timeout_s,
            verify=options.verify,
            base_version=self._base.version if self._base and self._all_have(self._base) else None,
            folder=options.folder,
            rendezvous=options.rendezvous,
        )

    def _all_have(self, base: KnownWeights) -> bool:
        states = [self._states[name] for name in self.carriers]
        return all((each.version, each.digest, each.serving) == (base.version, base.digest, True) for each in states)

    @asynccontextmanager
    async def _leaving_out(self, update: WeightUpdate) -> AsyncGenerator[None]:
        """Have the ranks know of each receiver that has failed since the decision, or fails meanwhile."""
        reported = self.short.keys() - self.carriers.keys()

        async def tell() -> None:
            while True:
                if not (names := self.short.keys() - reported):
                    await self._changed.wait()
                for name in names:
                    reported.add(name)
                    with suppress(Failure):  # they learn it when it does not answer
                        await self._senders.leave_out(update.update_id, name, self.short[name].reason)

        telling = asyncio.create_task(tell())
        try:
            yield
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _prepare(self, update: WeightUpdate, offers: Sequence[Offer]) -> None:
        async def ask(name: InstanceId) -> None:
            self._prepared.append(name)  # also one whose reply is lost has something to abort
            prepare = PrepareUpdate(_as_sent_to(name, update), self.carriers[name], tuple(offers), instance=name)
            self._note(name, await self._reply(name, partial(self._servers[name].control.prepare, prepare)))

        await gather_all(*map(ask, self._remaining))

    async def _send(self, update: WeightUpdate) -> None:
        """Wait for the ranks and watch the servers, as long as one is left."""
        if not self._remaining:
            return
        sending = asyncio.create_task(_awaited(self._senders.sent(update.update_id)))
        sending.add_done_callback(lambda _: self._changed.notify_all())
        watching = [asyncio.create_task(self._watch(update, name)) for name in self._remaining]
        try:
            while self._remaining and not sending.done():
                await self._changed.wait()
            reports = sending.result() if sending.done() else list[SendReport]()
        finally:
            for task in (sending, *watching):
                task.cancel()
            await asyncio.gather(sending, *watching, return_exceptions=True)
        self.num_bytes = sum(report.num_bytes for report in reports)
        self.num_bytes_unchanged = sum(report.num_bytes_unchanged for report in reports)
        all_bytes = self.num_bytes + self.num_bytes_unchanged
        self.share_equal = sum(report.num_bytes_equal for report in reports) / max(1, all_bytes)
        for report in reports:
            for name, why in report.failed.items():
                self.fail(InstanceId(name), f"{report.sender}: {why}")
        if reports and update.verify != "none":
            self.digest = total_of(report.digest for report in reports)
            self.tensors = summed_by_name(report.tensors for report in reports)

    async def _watch(self, update: WeightUpdate, name: InstanceId) -> None:
        while name not in self.short:
            await asyncio.sleep(WATCH_S)
            reply = await _outcome(self._servers[name].control.state())
            if isinstance(reply, SlotLost):
                self.fail(name, reply)
            elif isinstance(reply, ServerState):
                if reply.incarnation != self.incarnation(name):
                    self.fail(name, _other_process(name))
                elif reply.update and reply.update.update_id == update.update_id:
                    self._note(name, reply.update)

    async def _verify_and_commit(self, update: WeightUpdate, name: InstanceId) -> None:
        """Have a server verify and commit what it has got. A commit that has begun goes on to its end."""
        self._note(name, await self._verify(update, name))
        if name not in self.short:
            self._commits.append(commit := start(self._commit(update, name)))
            await finish(commit)

    async def _verify(self, update: WeightUpdate, name: InstanceId) -> UpdateProgress | Failure:
        """Return what a server has found. Where its reply is lost or late, its state says whether it has; only one that
        still gets buckets, such as from another server, is waited for again."""
        control, num_buckets = self._servers[name].control, 0
        patience_s = self._options.bucket_timeout_s + self.num_bytes / DIGEST_BYTES_PER_S
        while True:
            left_s = max(self._deadline_s - self._clock(), self._options.probe_timeout_s)
            limit_s = min(left_s, patience_s)
            reply = await self._reply(
                name, lambda limit_s=limit_s: _within(control.verify(self._end_message(update)), limit_s, name)
            )
            if not isinstance(reply, SlotLost | Late | Interrupted):
                return reply
            state = await self._reply(name, control.state)
            if not isinstance(state, ServerState):
                return state
            progress = state.update
            if state.incarnation != self.incarnation(name) or not progress or progress.update_id != update.update_id:
                return reply
            if progress.phase not in ("prepared", "receiving", "staged"):
                return progress
            if progress.num_buckets == num_buckets or (isinstance(reply, Late) and progress.phase == "staged"):
                return reply
            num_buckets = progress.num_buckets

    async def _commit(self, update: WeightUpdate, name: InstanceId) -> None:
        """Change a server over while nothing is sampled there, by any client. It goes on only when it has committed;
        else its lease ends the pause, and nothing is asked of it by then."""
        options, control = self._options, self._servers[name].control
        pause = PauseServer(update.epoch, options.pause_mode, options.pause_lease_s)
        began_s = self._clock()
        try:
            paused = await self._reply(name, partial(control.pause, pause))
            if isinstance(paused, Failure):
                return self._note(name, paused)
            reply = await self._reply(name, partial(control.commit, self._end_message(update)))
            if isinstance(reply, SlotLost | Late | Interrupted):
                reply = await self._reply(name, partial(self._what_came_of, update, name, reply))
            self._note(name, reply)
            if name not in self.short:
                self.committed.append(name)
                with suppress(Failure):  # the lease ends it then
                    await control.resume(ResumeServer(pause.epoch))
        finally:
            self.pause_s = max(self.pause_s, self._clock() - began_s)

    async def _what_came_of(self, update: WeightUpdate, name: InstanceId, lost: Failure) -> UpdateProgress:
        """Find out by the server's state what became of a commit whose reply was lost, and return the outcome. Only
        where the state says that it was not done is the commit sent once more. Raises a Failure."""
        control, state = self._servers[name].control, None
        for _ in range(NUM_ASKED):
            state = await _outcome(control.state())
            if not isinstance(state, Late):
                break
        if not isinstance(state, ServerState):
            raise state or lost
        if state.incarnation != self.incarnation(name):
            raise SlotLost(_other_process(name).reason)
        if state.version == update.version and self.digest in ("", state.digest):
            return UpdateProgress(update.update_id, "committed", digest=state.digest)
        return await control.commit(self._end_message(update))

    async def _finish_or_abort(self, update: WeightUpdate) -> None:
        """Have those abort that have not committed, and the ranks go on. Raises what the ranks raise where nobody has
        committed: a version that servers have is not lost for what a rank cannot be told, who learns it by the next
        one."""
        await asyncio.gather(*self._commits, return_exceptions=True)
        gone = {name for name, why in self.short.items() if why.fault in ("gone", "restarted")}

        async def abort(name: InstanceId) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.probe_timeout_s):
                    await _outcome(self._servers[name].control.abort(self._end_message(update)))

        finished, *_ = await gather_all(
            _outcome(self._senders.finish_update(update.update_id, aborted=not self.committed)),
            *(abort(name) for name in self._prepared if name not in gone and name not in self.committed),
        )
        if isinstance(finished, Failure) and not self.committed:
            raise finished

    async def _review_failed(self, update: WeightUpdate) -> None:
        """Look at those that failed without being at fault as far as is known: they may be gone, hang, or be others. Of
        those in a group, which all fail together, it is the ones with the fewest buckets that have held the others up.
        """
        unclear = [name for name, why in self.short.items() if why.fault in ("undone", "refused")]
        asked = [
            replace(self._servers[name], incarnation=self.incarnation(name)) for name in unclear if name in self._states
        ]
        found = await self._ask_states({server.id: server for server in asked})
        absent = {name: why for name, why in found.items() if isinstance(why, Shortfall)}
        for name, why in absent.items():
            self.short[name] = Shortfall(why.fault, f"{self.short[name].reason}; {why.reason}")
        by_group = {name for name, carrier in self.carriers.items() if carrier == "point_to_point"}
        loaded = {
            name: progress.num_buckets
            for name, state in found.items()
            if isinstance(state, ServerState)
            and name in by_group
            and self.short[name].fault == "undone"
            and (progress := state.update)
            and progress.update_id == update.update_id
        }
        for name, num_buckets in loaded.items():
            if num_buckets > min(loaded.values()) or by_group.intersection(absent):
                self.short[name] = Shortfall("held_up", self.short[name].reason)

    async def _reply(self, name: InstanceId, ask: Callable[[], Awaitable[T]]) -> T | Failure:
        """Return what a server replies, or fails with, once it is out at the latest."""

        async def asked() -> T | Failure:
            return await _outcome(ask())  # made here: one that is out already is not asked

        asking = asyncio.create_task(asked())
        asking.add_done_callback(lambda _: self._changed.notify_all())
        try:
            while not asking.done() and name not in self.short:
                await self._changed.wait()
            return asking.result() if asking.done() else Interrupted(self.short[name].reason)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def _note(self, name: InstanceId, reply: UpdateProgress | Failure) -> None:
        if isinstance(reply, Failure):
            self.fail(name, reply)
        elif reply.phase in ("failed", "aborted"):
            self.fail(name, reply.reason or f"the update has {reply.phase}")

    def _end_message(self, update: WeightUpdate) -> EndUpdate:
        return EndUpdate(update.update_id, update.epoch, update.version, self.digest)


def _as_sent_to(name: InstanceId, update: WeightUpdate) -> WeightUpdate:
    """Return the decision as a server gets it: with no other server's token."""
    receivers = (each if each.instance == name else replaced(each, token="") for each in update.receivers)
    return replaced(update, receivers=tuple(receivers))


def _other_process(name: InstanceId) -> Shortfall:
    return Shortfall("restarted", f"{name} was started anew: another process answers at its address")


async def _outcome(call: Awaitable[T]) -> T | Failure:
    try:
        return await call
    except Failure as error:
        return error


async def _within(call: Awaitable[T], limit_s: float, name: InstanceId) -> T:
    try:
        async with asyncio.timeout(limit_s):
            return await call
    except TimeoutError:
        raise Late(f"{name} did not reply within {said(limit_s)}") from None


async def _awaited(call: Awaitable[T]) -> T:
    return await call
