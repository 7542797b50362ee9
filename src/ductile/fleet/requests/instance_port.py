"""Ports: the one way to ask, tell, measure and give up an instance, whatever it is.

    SlotsPort    an instance on slots of the run, over the mailbox
    ServerPort   a server that the run did not start, over HTTP (`ductile.fleet.servers.server_port`)

The pool and all that is built on it go over ports and know no slots.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ductile.concurrency.background import start
from ductile.core.instances.instances import Instance, Serving
from ductile.fleet.requests.assign_role import assignment
from ductile.messages.workers import Command, Receive, ReleaseRole, Reply
from ductile.records import GenerateRequest, Manifest
from ductile.roles import Failure, Interrupted, Late, SlotLost
from ductile.transport.fanout import AFTER_FAILURE_S, ask_in_step, raise_worst
from ductile.transport.mailbox import Died, Mailbox, Outcome, SlotEvent


@dataclass(frozen=True, slots=True)
class Returned:
    """A request comes back unfinished, with the tokens that its instance had sampled for it."""

    request: GenerateRequest
    failure: Failure


InstanceEvent = SlotEvent | Returned
"""Events that an instance sends unasked, its end included."""


class InstancePort(Protocol):
    """Way to one instance. Each call has a finite deadline of the port's."""

    @property
    def instance(self) -> Instance: ...

    @property
    def version(self) -> int | None:
        """Weight version that is live on the instance; None where that is not known."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Sequences that a generator runs at once; 0 where the port does not know."""
        ...

    @property
    def why_lost(self) -> str:
        """The sentence that says why the instance is lost; "" while it is not."""
        ...

    @property
    def is_needed(self) -> bool:
        """True where the run would end with the instance: it is never given up."""
        ...

    def describe(self) -> str: ...

    def listen(self, deliver: Callable[[InstanceEvent], None]) -> None:
        """Call `deliver` in the event loop with what the instance says unasked, and with `Died` when it is gone."""
        ...

    async def ask(self, command: Command) -> Reply:
        """Have the instance execute a command, and return its reply. Raises SlotLost, Late or Refused."""
        ...

    async def receive(self, manifest: Manifest) -> None:
        """Return when the version is live on the instance: slots take it now, a server has been given it by now.
        Raises SlotLost, Late, Refused, or Interrupted where a server has not got it."""
        ...

    async def release(self) -> None:
        """End the instance, which says nothing more. Raises SlotLost, Late or Refused."""
        ...

    def condemn(self, why: str) -> None:
        """Take from the instance what it has been asked, as it does not do it. Slots are killed, and `Died` comes of
        them. A server loses its requests, and each comes back (`Returned`)."""
        ...


def check_has(port: InstancePort, version: int) -> None:
    """Raise SlotLost or Interrupted where an instance that should have been given the version does not have it."""
    if port.why_lost:
        raise SlotLost(port.why_lost)
    if port.version != version:
        has = "keeps its own weights" if port.version is None else f"has version {port.version}"
        # Not refused: that would be the version's fault, and not this server's.
        raise Interrupted(f"{port.describe()} {has}, and was not given version {version}")


class RoleSlots:
    """The slots of a run, as far as they may hold one role: a port for each instance that is on them."""

    def __init__(
        self,
        mailbox: Mailbox,
        role: Serving,
        command_s: float,
        condemn: Callable[[int, str], None] | None = None,
        is_needed: Callable[[int], bool] = lambda slot: False,
        rendezvous: str = "",
    ) -> None:
        """command_s: seconds until a slot must have replied. condemn(slot, sentence): kills a slot that hangs, which
        is lost from then on (`Cluster.condemn`); None gives it up without that. is_needed(slot): whether the run would
        end with the slot, which is not killed then. rendezvous: host:port where the slots of an instance find each
        other; "" where each is on one slot."""
        self.role: Serving = role
        self.mailbox, self.command_s, self.rendezvous = mailbox, command_s, rendezvous
        self.is_needed, self.condemn = is_needed, condemn or mailbox.lose
        self._ports: dict[int, SlotsPort] = {}
        """The port that each slot is behind."""
        mailbox.subscribe(self._on_event)

    def open(self, instance: Instance) -> "SlotsPort":
        """Return the port of an instance that has these slots, or is to get them. Raises ValueError when another has
        one."""
        for slot in instance.slots:
            if slot in self._ports:
                raise ValueError(f"slot {slot} has the role {self.role!r} already")
        port = SlotsPort(instance, self)
        self._ports.update(dict.fromkeys(instance.slots, port))
        return port

    def has(self, port: "SlotsPort", slot: int) -> bool:
        """Return False once the instance has left the slot, which another one may be on."""
        return self._ports.get(slot) is port

    def close(self, port: "SlotsPort") -> None:
        """Hear nothing more of the slots, which others may have from now on."""
        for slot in port.instance.slots:
            if self.has(port, slot):
                del self._ports[slot]

    def _on_event(self, slot: int, event: SlotEvent) -> None:
        if port := self._ports.get(slot):
            port.on_event(event)


class SlotsPort:
    """Follows `InstancePort`. Roles and weights go to every slot of the instance; all else to those that are asked
    (`Instance.asked`), the first of which speaks for it."""

    max_num_seqs = 0

    def __init__(self, instance: Instance, slots: RoleSlots) -> None:
        self.instance = instance
        self.version: int | None = None
        self._slots, self._mailbox = slots, slots.mailbox
        self._deliver: Callable[[InstanceEvent], None] = lambda event: None
        self._died = ""
        self._leaving: list[asyncio.Task[None]] = []

    @property
    def why_lost(self) -> str:
        lost = self._mailbox.lost
        return self._died or next((lost[slot] for slot in self.instance.slots if slot in lost), "")

    @property
    def is_needed(self) -> bool:
        return any(map(self._slots.is_needed, self.instance.slots))

    def describe(self) -> str:
        """Return "slot 2 (generate, pid 123)"; of an instance on several slots that are all asked, its id."""
        asked = self.instance.asked
        return self._mailbox.describe(asked[0]) if len(asked) == 1 else self.instance.id

    def listen(self, deliver: Callable[[InstanceEvent], None]) -> None:
        self._deliver = deliver

    async def ask(self, command: Command) -> Reply:
        return await ask_in_step(self._mailbox, self.instance.asked, command, self._slots.command_s)

    async def join(self, settings: Mapping[str, object]) -> None:
        """Have the slots take the role, without weights. One that hangs is killed. Raises SlotLost, Late or Refused."""
        assign = assignment(self.instance, settings, self._slots.rendezvous, joining=True)
        commands = dict.fromkeys(self.instance.slots, assign)
        outcomes = await self._mailbox.ask_all(commands, self._slots.command_s, AFTER_FAILURE_S)
        self._condemn_late(outcomes)
        raise_worst(outcomes)

    async def receive(self, manifest: Manifest, joining: bool = False) -> None:
        """Give the weights to all slots, and return when they are live. Raises SlotLost, Late or Refused.

        joining: the instance has no weights yet. A slot that hangs as it gets them is killed.
        """
        commands = dict.fromkeys(self.instance.slots, Receive(self._slots.role, manifest, joining=joining))
        outcomes = await self._mailbox.ask_all(commands, self._slots.command_s)
        if joining:
            self._condemn_late(outcomes)
        raise_worst(outcomes)
        self.version = manifest.version

    async def release(self) -> None:
        self._slots.close(self)
        release = dict.fromkeys(self.instance.slots, ReleaseRole(self._slots.role))
        raise_worst(await self._mailbox.ask_all(release, self._slots.command_s))

    async def leave(self) -> None:
        """Returns when each slot has given the role up, which it may not even have, or is lost."""
        await asyncio.wait(self._leave())

    def condemn(self, why: str) -> None:
        for slot in self.instance.slots:
            if self._slots.has(self, slot):
                self._slots.condemn(slot, f"{why}; it has been killed")

    def on_event(self, event: SlotEvent) -> None:
        if isinstance(event, Died):
            self._died = event.reason
            self._leave()  # at once: what is asked of the slots from now on comes after it
        self._deliver(event)

    def _leave(self) -> "list[asyncio.Task[None]]":
        if not self._leaving:
            self._slots.close(self)
            self._leaving = [start(self._release(slot)) for slot in self.instance.slots]
        return self._leaving

    async def _release(self, slot: int) -> None:
        with suppress(Failure):
            await self._mailbox.ask(slot, ReleaseRole(self._slots.role), self._slots.command_s)

    def _condemn_late(self, outcomes: Mapping[int, Outcome]) -> None:
        """Kill the slots that hang as they take their first role, or its weights: they would not release it in time,
        either."""
        for slot, outcome in outcomes.items():
            has_others = self._mailbox.roles(slot) != (self._slots.role,) or self._slots.is_needed(slot)
            if isinstance(outcome, Late) and not has_others:
                self._slots.condemn(slot, f"{outcome}; it has been killed")
