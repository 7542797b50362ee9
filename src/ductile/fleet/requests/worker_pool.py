"""The instances of a role (generate, score): who takes work, who comes, who goes, and how one is told of something.

    instances  have the live version and take work
    draining   take no more work, and finish what they have
    waiting    do not have the live version: they take work when they get one

A version goes live on all of them while none joins, so none ends up on another version. An instance that does not take
it, or does not do its work in time, is given up (`leave_behind`) and holds up nobody but itself: slots are killed and
come back as a new instance (`ductile.elastic.recovery`), a server waits for a version that it takes.

Each instance is behind a port (`ductile.fleet.requests.instance_port`). What is on the other side of it matters only to
how an instance comes and how it gets a version: slots by the mailbox, servers by a transaction (`Delivery`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Protocol

from ductile.concurrency.background import finish
from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.deadline import said
from ductile.concurrency.listeners import Listeners
from ductile.concurrency.read_write_lock import ReadWriteLock
from ductile.core.instances.instances import Instance, InstanceId, Serving, in_order, slots_on
from ductile.core.rollouts.provenance import KnownWeights
from ductile.error_text import error_text
from ductile.fleet.requests.instance_port import InstanceEvent, InstancePort, RoleSlots, SlotsPort
from ductile.fleet.requests.weight_offers import WeightOffers
from ductile.messages.workers import Command, Reply
from ductile.records import Manifest
from ductile.roles import Failure, Late, NotTaken, Refused, SlotLost
from ductile.transport.deadlines import Deadlines
from ductile.transport.fanout import raise_worst
from ductile.transport.mailbox import Died, Outcome

ANY_VERSION = range(-1, 1 << 31)
MOST_LOST = 5
"""Generators that may be lost with one request before it fails, and times that scorers may be with the same samples."""


class Delivery(Protocol):
    """Way by which versions get to the servers among a pool's instances (`ductile.orchestrator.commands.servers`); to
    slots they get by `Receive`."""

    async def deliver(self, version: int) -> KnownWeights:
        """Return what servers have been given, once each has this version, which the trainer's weights are, or is left
        behind. Others come and go meanwhile. Raises a Failure when the version is not to go live."""
        ...

    @property
    def missing(self) -> str:
        """Why servers are not there, address by address; "" where none is known to be missing."""
        ...


class WorkerPool:
    """Base of the role's client: `generators.RemoteGenerators`, `scorer.RemoteScorer`."""

    def __init__(
        self,
        role: Serving,
        slots: RoleSlots | None,
        instances: Iterable[Instance],
        deadlines: Deadlines,
        offers: WeightOffers | None,
    ) -> None:
        """slots: None where the run has none for the role. instances: those on slots, which have the role.
        offers: None where no instance on slots ever joins."""
        self.instances: tuple[Instance, ...] = ()
        self.version: int | None = None
        """Version that is live; None before the first."""
        self.num_waiting = 0
        """Calls of `some` that wait for an instance."""
        # Longer than a source that hangs at its offer, and then a newcomer that hangs at its weights, hold it: who
        # waits for them is not to blame, and the run need not end.
        self.lock = ReadWriteLock(float(deadlines.patience_s) + 2 * deadlines.command_s)
        self._to_servers: Delivery | None = None
        self.on_change = Listeners[[]]()
        """Told when `instances` have changed, or what they can take, or a call of `some` begins to wait for one."""
        self.on_lost = Listeners[[InstanceId, str]]()
        """Told of each instance that is lost, with a sentence, and not of those that are removed."""
        self._role: Serving = role
        self._slots, self._deadlines, self._offers = slots, deadlines, offers
        self._ports: dict[InstanceId, InstancePort] = {}
        self._draining = set[InstanceId]()
        self._waiting = dict[InstanceId, str]()
        """Reason for which each instance that waits does not take work."""
        self._put_aside = set[InstanceId]()
        """Instances that wait for `readmit`, whichever version they get."""
        self._lost: dict[InstanceId, str] = {}
        """Deaths of instances, a sentence each."""
        self._changed = ChangeSignal()
        if slots is not None:
            for instance in instances:
                self._add(self._open(slots, instance))

    def deliver_by(self, delivery: Delivery) -> None:
        """Have this bring versions to the servers that are among the instances."""
        self._to_servers = delivery

    @property
    def all_instances(self) -> tuple[Instance, ...]:
        """All instances of the role, in the order of their slots."""
        return in_order(port.instance for port in self._ports.values())

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of the instances that take work."""
        return slots_on(self.instances)

    @property
    def serving(self) -> tuple[Instance, ...]:
        """Instances that have weights: they can work, though the draining ones get nothing new."""
        return tuple(each for each in self.all_instances if each.id not in self._waiting)

    def on_event(self, instance: Instance, event: InstanceEvent) -> None:
        """Hear what the instances say, `Died` included: then the instance has left the pool."""

    def on(self, slot: int) -> Instance | None:
        """Return the instance that is on this slot."""
        return next((port.instance for port in self._ports.values() if slot in port.instance.slots), None)

    def describe(self, instance: Instance) -> str:
        """Return "slot 2 (generate, pid 123)"; of a server, or of one on several slots, its id."""
        port = self._ports.get(instance.id)
        return port.describe() if port else instance.id

    def why_lost(self, instance: Instance) -> str:
        """Return the sentence that says why the instance is lost; "" while it is not."""
        port = self._ports.get(instance.id)
        return port.why_lost if port else self._lost.get(instance.id, "")

    def of_versions(self, versions: range) -> tuple[Instance, ...]:
        """Return the instances that take work and have one of these versions. Where one does not say, it has the live
        one."""
        has = {each: self._ports[each.id].version for each in self.instances}
        live = 0 if self.version is None else self.version
        return tuple(each for each, version in has.items() if (live if version is None else version) in versions)

    async def ask(self, instance: Instance, command: Command) -> Reply:
        """Tell the instance, and wait for its reply. Raises SlotLost, Late or Refused."""
        if why := self.why_lost(instance):
            raise SlotLost(why)
        if (port := self._ports.get(instance.id)) is None:
            raise NotTaken(f"{instance.id} has left")
        try:
            return await port.ask(command)
        except Failure:
            raise
        except Exception as error:  # whatever a port raises, such as of a message that cannot be sent
            raise Refused(f"{port.describe()}: {error_text(error)}") from error

    async def ask_all(self, commands: Mapping[Instance, Command]) -> dict[Instance, Outcome]:
        """Tell several instances at once; one outcome each, never an exception."""
        outcomes = await asyncio.gather(*(self._outcome(*item) for item in commands.items()))
        return dict(zip(commands, outcomes, strict=True))

    async def some(
        self, what: str, without: Collection[Instance] = (), versions: range = ANY_VERSION
    ) -> tuple[Instance, ...]:
        """Return the instances that take work, at least one. Raises Late when none comes. what: the work, such as "12
        samples". without: instances that were lost with it; their connection may end before the news of their death
        comes. versions: those that one of them may have."""

        def there() -> tuple[Instance, ...]:
            return tuple(each for each in self.of_versions(versions) if each not in without)

        if not there():
            self.num_waiting += 1
            self.on_change()
            try:
                await self._changed.wait_for(lambda: bool(there()), self._deadlines.patience_s)
            except TimeoutError:
                waited, last = said(self._deadlines.patience_s), next(reversed(self._lost.values()), "")
                lost = f"; the last one was lost: {last}" if last else ""
                if self._to_servers is not None and self._to_servers.missing:
                    lost += f"; of the servers: {self._to_servers.missing}"
                raise Late(f"for {waited} no slot had the role {self._role!r}, for {what}{lost}") from None
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
        if self._offers is None or self._slots is None:
            raise ValueError(f"{instance.id} cannot join: nobody offers it weights here")
        port = self._open(self._slots, instance)
        if not self.instances:  # before the next version is published: nobody may be left then who has the live one
            self._offers.want_whole()
        try:
            await port.join(settings)
            if after is not None:
                await self._while_there(port, after())
            async with self.lock.shared(f"{instance.id} joins"):
                version = self.version
                takes_work = version is not None and await self._offers.give(port, version)
                if why := port.why_lost:
                    raise SlotLost(why)
                if not takes_work:
                    self._offers.want_whole()
                self._add(port, "" if takes_work else "it waits for its first weights")
                return takes_work
        except BaseException:
            self._offers.forget(port)
            await finish(port.leave())
            raise

    async def add_server(self, port: InstancePort) -> bool:
        """Add an instance that is not on slots of the run, with the weights that it has. Returns whether it takes work;
        else it waits for a version. Raises ValueError when it is there already, SlotLost when it is lost."""
        async with self.lock.shared(f"{port.instance.id} joins"):
            if port.instance.id in self._ports:
                raise ValueError(f"{port.instance.id} is in the fleet already")
            if why := port.why_lost:
                raise SlotLost(why)
            port.listen(lambda event: self._tell(port, event))
            self._add(port, behind := self._behind(port))
            return not behind

    def put_aside(self, id: InstanceId, why: str) -> None:
        """Give the instance no new work until `readmit`; what it has goes to others. Nothing happens when it is
        none any more."""
        if port := self._ports.get(id):
            self._put_aside.add(id)
            self._take_out(port, why)

    def readmit(self, id: InstanceId) -> bool:
        """Give work again to an instance that was put aside, if it has the live version. Returns whether it has."""
        if (port := self._ports.get(id)) is None:
            return False
        self._put_aside.discard(id)
        self._waiting.pop(id, None)
        if behind := self._behind(port):
            self._waiting[id] = behind
        self._update()
        return not behind

    async def remove_server(self, id: InstanceId, why: str) -> None:
        """Take the instance out at once; what it has goes to others. Nothing happens when it is none any more."""
        if port := self._ports.get(id):
            port.condemn(why)
            self._end(port, Died(why))
            await port.release()

    def drain(self, instance: Instance) -> None:
        """Give the instance no more work, also when it gets a version that it waits for. Nothing happens when it is
        none any more."""
        if instance.id in self._ports:
            self._draining.add(instance.id)
            self._update()

    def resume(self, instance: Instance) -> None:
        """Give a draining instance work again."""
        if instance.id in self._draining:
            self._draining.discard(instance.id)
            self._update()

    async def release(self, instance: Instance) -> None:
        """Have the instance release the role. Nothing happens when it is not in the pool, or is lost."""
        if instance.id not in self._ports:
            return
        self.drain(instance)
        async with self.lock.shared(f"{instance.id} leaves"):
            if port := self._ports.get(instance.id):
                self._forget(port)
                await port.release()

    async def receive(self, manifest: Manifest) -> KnownWeights:
        """Bring the version to all instances, to each by the way of its kind, and have it go live. Return what they
        have been given. Raises what `Delivery.deliver` and `go_live` raise.

        Servers get it first, and without the lock: those that the delivery waits for could not come otherwise. What
        they sample from it until it is live is as good as what the others sample from the version before.
        """
        given = KnownWeights.of(manifest)
        if self._to_servers is not None:
            sent = await self._to_servers.deliver(manifest.version)
            given = given if given.digest else sent  # no snapshot was made: what was sent is all that is known
        await self.go_live(manifest)
        return given

    async def go_live(self, manifest: Manifest) -> None:
        """Returns when the version is live on every instance that takes it: slots receive it, servers have it by now.
        The others are left behind. Nothing happens when a later version is live.

        Raises Refused when all of several refuse it: the fault is the version's. Raises Refused or Late when one cannot
        be given up (`leave_behind`).
        """
        async with self.lock.exclusive(f"version {manifest.version} goes live"):
            if self.version is not None and manifest.version < self.version:
                return
            asked = {each: self._ports[each.id] for each in self.all_instances if not self._leaves(each.id)}
            outcomes = await asyncio.gather(*(_received(port, manifest) for port in asked.values()))
            failed = {instance: failure for instance, failure in zip(asked, outcomes, strict=True) if failure}
            if len(asked) > 1 and all(isinstance(failed.get(instance), Refused) for instance in asked):
                raise_worst(failed)
            self.leave_behind(failed)
            self.version = manifest.version
            for instance, port in asked.items():
                if instance not in failed and self._ports.get(instance.id) is port:
                    if instance.id not in self._put_aside:
                        self._waiting.pop(instance.id, None)
                    if self._offers is not None:
                        self._offers.note(port, manifest.version)
            self._update()
            self._changed.notify_all()  # work may wait for the version

    def leave_behind(self, failed: Mapping[Instance, Failure]) -> None:
        """Go on without the instances that failed at what they were asked: one that is late or refuses is given up
        (`InstancePort.condemn`), and takes work again with the next version that it takes.

        A slot that the run would end with, such as one that also trains, cannot be: what such ones failed with is
        raised, the worst of it.
        """
        ports = {
            self._ports[instance.id]: failure
            for instance, failure in failed.items()
            if instance.id in self._ports and not isinstance(failure, SlotLost)
        }
        raise_worst({port: failure for port, failure in ports.items() if port.is_needed})
        for port, failure in ports.items():
            self._take_out(port, str(failure))

    def _open(self, slots: RoleSlots, instance: Instance) -> SlotsPort:
        port = slots.open(instance)
        port.listen(lambda event: self._tell(port, event))
        return port

    def _take_out(self, port: InstancePort, why: str) -> None:
        self._waiting[port.instance.id] = why
        port.condemn(why)
        self._update()

    def _tell(self, port: InstancePort, event: InstanceEvent) -> None:
        instance = port.instance
        if self._ports.get(instance.id) is port:
            if isinstance(event, Died):
                self._end(port, event)
                self.on_lost(instance.id, event.reason)
            else:
                self.on_event(instance, event)
        elif isinstance(event, Died):
            self._changed.notify_all()  # it was about to join

    def _end(self, port: InstancePort, end: Died) -> None:
        if self._ports.get(port.instance.id) is port:
            self._lost[port.instance.id] = end.reason
            self._forget(port)
            self.on_event(port.instance, end)

    def _add(self, port: InstancePort, waits: str = "") -> None:
        """Add an instance. waits: why it does not take work yet."""
        instance = port.instance
        self._lost.pop(instance.id, None)  # a server may come back under its address
        self._ports[instance.id] = port
        if waits:
            self._waiting[instance.id] = waits
        self._update()

    def _forget(self, port: InstancePort) -> None:
        id = port.instance.id
        del self._ports[id]
        self._draining.discard(id)
        self._put_aside.discard(id)
        self._waiting.pop(id, None)
        if self._offers is not None:
            self._offers.forget(port)
        self._update()

    def _leaves(self, id: InstanceId) -> bool:
        """Return whether it is a server that drains: it finishes what it has, with the version that it has."""
        return id in self._draining and not self._ports[id].instance.slots

    def _behind(self, port: InstancePort) -> str:
        """Return why the instance cannot take work, as another version is live; "" where it can."""
        if self.version is None or port.version in (None, self.version):
            return ""
        return f"{port.describe()} has version {port.version}, and {self.version} is live"

    def _update(self) -> None:
        """Tell of the instances that take work, where they are others now."""
        takes_work = [each for each in self.all_instances if each.id not in self._waiting.keys() | self._draining]
        if self.instances != (instances := in_order(takes_work)):
            self.instances = instances
            self._changed.notify_all()
            self.on_change()

    async def _outcome(self, instance: Instance, command: Command) -> Outcome:
        try:
            return await self.ask(instance, command)
        except Failure as error:
            return error

    async def _while_there(self, port: SlotsPort, waiting: Awaitable[None]) -> None:
        """Wait, as long as the instance that joins has its slots. Raises SlotLost at once when it loses one."""
        task = asyncio.ensure_future(waiting)
        task.add_done_callback(lambda _: self._changed.notify_all())
        try:
            while not task.done():
                if why := port.why_lost:
                    raise SlotLost(why)
                await self._changed.wait()
            await task
        finally:
            task.cancel()


async def _received(port: InstancePort, manifest: Manifest) -> Failure | None:
    """Return the failure of the instance; None where the version is live on it."""
    try:
        await port.receive(manifest)
    except Failure as failure:
        return failure
    return None
