"""The instances of a role (generate, score): who takes work, who comes, who goes, and how one is told of something.

    instances  have the live version and take work
    draining   take no more work, and finish what they have
    waiting    have no weights: no slot has the live version any more, so the next one is their first

A version goes live on all of them while none joins, so none ends up on another version. An instance that does not take
it, or does not do its work in time, is killed and comes back as a new one (`ductile.elastic.recovery`): it holds up
nobody but itself.

Roles and weights go to every slot of an instance; all else goes to those that are asked (`Instance.asked`), the first
of which speaks for it. An external server has no slot: a `Server` takes its messages, and it keeps the weights that it
has.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Protocol

from ductile.concurrency.background import finish, start
from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.deadline import said
from ductile.concurrency.listeners import Listeners
from ductile.concurrency.read_write_lock import ReadWriteLock
from ductile.core.instances.instances import Instance, InstanceId, Serving, in_order, slots_on
from ductile.error_text import error_text
from ductile.fleet.assign_role import assignment
from ductile.fleet.leases import WeightLeases
from ductile.messages.workers import Command, Receive, ReleaseRole, Reply
from ductile.records import Manifest
from ductile.roles import Failure, Late, Refused, SlotLost
from ductile.transport.deadlines import Deadlines
from ductile.transport.fanout import AFTER_FAILURE_S, ask_in_step, raise_worst, worst_of
from ductile.transport.mailbox import Died, Mailbox, Outcome, SlotEvent

MOST_LOST = 5
"""Generators that may be lost with one request before it fails, and times that scorers may be with the same samples."""


class Server(Protocol):
    """An instance that is on no slot of ours: it takes the messages that the first slot of another one would."""

    async def ask(self, command: Command, deadline_s: float) -> Reply:
        """Raises SlotLost, Late or Refused."""
        ...

    def listen(self, deliver: Callable[[SlotEvent], None]) -> None:
        """Call `deliver` in the event loop with what the server says unasked, and with `Died` when it is gone."""
        ...


class WorkerPool:
    """Base of the role's client: `ductile.fleet.generators.RemoteGenerators`, `ductile.fleet.scorer.RemoteScorer`."""

    def __init__(
        self,
        mailbox: Mailbox,
        role: Serving,
        instances: Iterable[Instance],
        deadlines: Deadlines,
        leases: WeightLeases | None,
        servers: Mapping[InstanceId, Server] | None = None,
        condemn: Callable[[int, str], None] | None = None,
        is_needed: Callable[[int], bool] | None = None,
        rendezvous: str = "",
    ) -> None:
        """leases: None where no instance ever joins. servers: what takes the messages of instances without slots.
        condemn(slot, sentence): kills a slot that hangs, which is lost from then on (`Cluster.condemn`); None gives it
        up without that. is_needed(slot): whether the run would end with the slot, which is not killed then; None: with
        none. rendezvous: host:port where the slots of an instance find each other; "" where each is on one slot."""
        self.instances = in_order(instances)
        self.version: int | None = None
        """Version that is live; None before the first."""
        self.num_waiting = 0
        """Calls of `some` that wait for an instance."""
        # Longer than a source that hangs at its lease, and then a newcomer that hangs at its weights, hold it: who
        # waits for them is not to blame, and the run need not end.
        self.lock = ReadWriteLock(float(deadlines.patience_s) + 2 * deadlines.command_s)
        self.on_change = Listeners[[]]()
        """Told when `instances` have changed, or a call of `some` begins to wait for one."""
        self._servers = dict(servers or {})
        self._mailbox, self._deadlines, self._leases = mailbox, deadlines, leases
        self._condemn = condemn or mailbox.lose
        self._is_needed: Callable[[int], bool] = is_needed or (lambda slot: False)
        self._role: Serving = role
        self._rendezvous = rendezvous
        self._draining: dict[InstanceId, Instance] = {}
        self._waiting: dict[InstanceId, Instance] = {}
        self._on = {slot: instance for instance in self.instances for slot in instance.slots}
        """The instance on each slot."""
        self._joining: set[int] = set()
        """Slots of the instances that are about to join."""
        self._lost: dict[InstanceId, str] = {}
        """How external servers have died."""
        self._changed = ChangeSignal()
        mailbox.subscribe(self._on_event)
        for instance in self.instances:
            if not instance.slots:
                self._servers[instance.id].listen(lambda event, instance=instance: self._tell(instance, event))

    @property
    def all_instances(self) -> tuple[Instance, ...]:
        """All instances of the role, in the order of their slots."""
        return in_order((*self.instances, *self._draining.values(), *self._waiting.values()))

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of the instances that take work."""
        return slots_on(self.instances)

    @property
    def serving(self) -> tuple[Instance, ...]:
        """Instances that have weights: they can work, though the draining ones get nothing new."""
        return in_order((*self.instances, *self._draining.values()))

    def on_event(self, instance: Instance, event: SlotEvent) -> None:
        """Called with what the instances say, `Died` included: then the instance has left the pool."""

    def on(self, slot: int) -> Instance | None:
        """The instance that is on this slot."""
        return self._on.get(slot)

    def describe(self, instance: Instance) -> str:
        """ "slot 2 (generate, pid 123)"; of an external server, or of one on several slots, its id."""
        return self._mailbox.describe(instance.slots[0]) if len(instance.asked) == 1 else instance.id

    def why_lost(self, instance: Instance) -> str:
        """The sentence that says why the instance is lost; "" while it is not."""
        lost = self._mailbox.lost
        return next((lost[slot] for slot in instance.slots if slot in lost), self._lost.get(instance.id, ""))

    async def ask(self, instance: Instance, command: Command) -> Reply:
        """Tell the instance, and wait for its reply. Raises SlotLost, Late or Refused."""
        if why := self.why_lost(instance):
            raise SlotLost(why)
        if instance.slots:
            return await ask_in_step(self._mailbox, instance.asked, command, self._deadlines.command_s)
        try:
            return await self._servers[instance.id].ask(command, self._deadlines.command_s)
        except Failure:
            raise
        except Exception as error:  # whatever the server's client raises
            raise Refused(f"{instance.id}: {error_text(error)}") from error

    async def ask_all(self, commands: Mapping[Instance, Command]) -> dict[Instance, Outcome]:
        """Tell several instances at once; one outcome each, never an exception."""
        outcomes = await asyncio.gather(*(self._outcome(*item) for item in commands.items()))
        return dict(zip(commands, outcomes, strict=True))

    async def some(self, what: str, without: Collection[Instance] = ()) -> tuple[Instance, ...]:
        """The instances that take work, at least one. Raises Late when none comes. what: the work, such as "12
        samples". without: instances that were lost with it; their connection may end before the news of their death
        comes."""

        def there() -> tuple[Instance, ...]:
            return tuple(each for each in self.instances if each not in without)

        if not there():
            self.num_waiting += 1
            self.on_change()
            try:
                await self._changed.wait_for(lambda: bool(there()), self._deadlines.patience_s)
            except TimeoutError:
                raise Late(
                    f"for {said(self._deadlines.patience_s)} no slot had the role {self._role!r}, for {what}"
                ) from None
            finally:
                self.num_waiting -= 1
        return there()

    async def admit(
        self, instance: Instance, settings: Mapping[str, object], after: Callable[[], Awaitable[None]] | None = None
    ) -> bool:
        """Have the instance's slots take the role and the live weights. True: it takes work. False: it does from the
        next version on. Raises SlotLost, Refused, Late or what `after` raises, and the slots then do not have the role.

        after: returns when slots that have the role may take the weights and work. None: at once.
        """
        slots = instance.slots
        if self._leases is None:
            raise ValueError(f"{instance.id} cannot join: there are no weight leases here")
        for slot in slots:
            if slot in self._on or slot in self._joining:
                raise ValueError(f"slot {slot} has the role {self._role!r} already")
        self._joining.update(slots)
        try:
            assign = dict.fromkeys(slots, assignment(instance, settings, self._rendezvous, joining=True))
            outcomes = await self._mailbox.ask_all(assign, self._deadlines.command_s, AFTER_FAILURE_S)
            self._condemn_late(outcomes)
            raise_worst(outcomes)
            if after is not None:
                await self._while_there(instance, after())
            async with self.lock.shared(f"{instance.id} joins"):
                version = self.version
                takes_work = version is not None and await self._leases.give(instance, version, self._condemn_late)
                if why := self.why_lost(instance):
                    raise SlotLost(why)
                self._on.update(dict.fromkeys(slots, instance))
                if takes_work:
                    self._set((*self.instances, instance))
                else:
                    self._waiting[instance.id] = instance
                return takes_work
        except BaseException:
            await finish(self._release_half_joined(instance))
            raise
        finally:
            self._joining.difference_update(slots)

    def drain(self, instance: Instance) -> None:
        """The instance takes no more work. Nothing happens when it does not take any."""
        if instance in self.instances:
            self._draining[instance.id] = instance
            self._set(each for each in self.instances if each != instance)

    def resume(self, instance: Instance) -> None:
        """A draining instance takes work again."""
        if self._draining.pop(instance.id, None):
            self._set((*self.instances, instance))

    async def release(self, instance: Instance) -> None:
        """Have the instance's slots release the role. Nothing happens when it is not in the pool, or is lost."""
        if instance not in self.all_instances:
            return
        self.drain(instance)
        async with self.lock.shared(f"{instance.id} leaves"):
            if instance in self.all_instances:
                self._forget(instance)
                release = dict.fromkeys(instance.slots, ReleaseRole(self._role))
                raise_worst(await self._mailbox.ask_all(release, self._deadlines.command_s))

    async def receive(self, manifest: Manifest) -> None:
        """Returns when the version is live on every instance that takes it; the others are lost from then on. Nothing
        happens when a later version is live.

        Raises Refused when all of several refuse it: the fault is the version's. Raises Refused or Late when one cannot
        be killed (`leave_behind`).
        """
        async with self.lock.exclusive(f"version {manifest.version} goes live"):
            if self.version is not None and manifest.version < self.version:
                return
            asked = {*self._on.values()}
            commands = dict.fromkeys(sorted(self._on), Receive(self._role, manifest))
            outcomes = await self._mailbox.ask_all(commands, self._deadlines.command_s)
            failed = {
                instance: worst
                for instance in in_order(asked)
                if (worst := worst_of(outcomes[slot] for slot in instance.slots))
            }
            if len(asked) > 1 and all(isinstance(failed.get(instance), Refused) for instance in asked):
                raise_worst(failed)
            self.leave_behind(failed)
            self.version = manifest.version
            if self._leases is not None:
                for instance in (asked - failed.keys()) & {*self.all_instances}:
                    self._leases.note(instance, manifest.version)
            if first := {instance for instance in self._waiting.values() if instance not in failed}:
                self._set((*self.instances, *first))
                for instance in first:
                    del self._waiting[instance.id]

    def leave_behind(self, failed: Mapping[Instance, Failure]) -> None:
        """Go on without the instances that failed at what they were asked: one that is late or refuses is killed, and
        comes back as one that is lost does.

        An external server cannot be killed, nor a slot that the run would end with, such as one that also trains: what
        such ones failed with is raised, the worst of it.
        """
        failed = {instance: failure for instance, failure in failed.items() if not isinstance(failure, SlotLost)}
        raise_worst({instance: failure for instance, failure in failed.items() if not self._can_be_killed(instance)})
        for instance, failure in failed.items():
            for slot in instance.slots:
                if self.on(slot) == instance:  # or it has died meanwhile, and may be there again
                    self._condemn(slot, f"{failure}; it has been killed")

    def _on_event(self, slot: int, event: SlotEvent) -> None:
        if instance := self.on(slot):
            self._tell(instance, event)
        elif isinstance(event, Died):
            self._changed.notify_all()  # it may have been about to join

    def _tell(self, instance: Instance, event: SlotEvent) -> None:
        if isinstance(event, Died):
            self._forget(instance)
            if not instance.slots:
                self._lost[instance.id] = event.reason
            for slot in instance.slots:  # at once: what is asked of the slot from now on comes after it
                start(self._release(slot))
        self.on_event(instance, event)

    def _forget(self, instance: Instance) -> None:
        self._draining.pop(instance.id, None)
        self._waiting.pop(instance.id, None)
        for slot in instance.slots:
            self._on.pop(slot, None)
        if self._leases is not None:
            self._leases.forget(instance)
        if instance in self.instances:
            self._set(each for each in self.instances if each != instance)

    def _set(self, instances: Iterable[Instance]) -> None:
        self.instances = in_order(instances)
        self._changed.notify_all()
        self.on_change()

    async def _outcome(self, instance: Instance, command: Command) -> Outcome:
        try:
            return await self.ask(instance, command)
        except Failure as error:
            return error

    def _can_be_killed(self, instance: Instance) -> bool:
        return bool(instance.slots) and not any(map(self._is_needed, instance.slots))

    def _condemn_late(self, outcomes: Mapping[int, Outcome]) -> None:
        """Kill the slots that hang as they take their first role, or its weights: they would not release it in time,
        either."""
        for slot, outcome in outcomes.items():
            has_others = self._mailbox.roles(slot) != (self._role,) or self._is_needed(slot)
            if isinstance(outcome, Late) and not has_others:
                self._condemn(slot, f"{outcome}; it has been killed")

    async def _while_there(self, instance: Instance, waiting: Awaitable[None]) -> None:
        """Wait, as long as the instance that joins has its slots. Raises SlotLost at once when it loses one."""
        task = asyncio.ensure_future(waiting)
        task.add_done_callback(lambda _: self._changed.notify_all())
        try:
            while not task.done():
                if why := self.why_lost(instance):
                    raise SlotLost(why)
                await self._changed.wait()
            await task
        finally:
            task.cancel()

    async def _release_half_joined(self, instance: Instance) -> None:
        if self._leases is not None:
            self._leases.forget(instance)
        await asyncio.gather(*map(self._release, instance.slots))

    async def _release(self, slot: int) -> None:
        """Have a slot give the role up that may not even have it, or be lost."""
        with suppress(Failure):
            await self._mailbox.ask(slot, ReleaseRole(self._role), self._deadlines.command_s)
