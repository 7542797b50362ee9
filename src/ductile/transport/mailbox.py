"""The orchestrator's side of every conversation: ask one slot or many, hear their events, and give the lost ones up.

A mailbox knows no sockets: a `Transport` takes envelopes away and brings others in (`router` across processes). It
counts what it could not use instead of failing on it: a late or doubled reply is no error.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ductile.concurrency.deadline import said
from ductile.messages.message import RoleName
from ductile.messages.workers import Command, Envelope, Event, Failed, Heartbeat, Hello, Reply
from ductile.roles import REFUSALS, Failure, Late, Refused, SlotLost
from ductile.transport.parcel import Parcel

Outcome = Reply | Failure
"""Outcome of one command: its reply, or why there is none."""


@dataclass(frozen=True, slots=True)
class Died:
    """A slot is gone, or a server. Nothing says so on the wire: it is the mailbox that gives a slot up."""

    reason: str


SlotEvent = Event | Died
"""What listeners are told of a slot: what it says unasked, and its end."""
SlotListener = Callable[[int, SlotEvent], None]
Watcher = Callable[[int, type[Command] | None], None]


def _raise(sentence: str, error: Exception) -> None:
    error.add_note(sentence)
    raise error


class Transport(Protocol):
    async def post(self, slot: int, epoch: int, sequence: int, parcel: Parcel) -> None:
        """Take one command to a slot, in an `Envelope` with these numbers. Raises `SlotLost` when there is no way to
        it."""
        ...

    def listen(self, deliver: Callable[[int, Envelope], None]) -> None:
        """Call `deliver` in the event loop with whatever a slot sends, instead of whom this was called with before."""
        ...


@dataclass(frozen=True, slots=True)
class _PendingReply:
    slot: int
    command: Command
    future: "asyncio.Future[Reply]"


class Mailbox:
    """Commands and replies by sequence number. All of it runs in one event loop."""

    def __init__(
        self,
        transport: Transport,
        clock: Callable[[], float] = time.monotonic,
        on_error: Callable[[str, Exception], None] = _raise,
        before: "Mailbox | None" = None,
    ) -> None:
        """on_error: told when a listener raises, with a sentence. Its books are wrong from then on. Without it, asyncio
        is told. before: the mailbox that this one takes the place of, whose slots are all lost, as they are here at
        first. Numbers go on from there, so nothing is taken for another's."""
        self.epoch = before.epoch + 1 if before else 0
        """Membership epoch, sent with every command; a slot refuses an older one than it has seen."""
        self.lost: dict[int, str] = dict(before.lost) if before else {}
        """Slots that were given up, with the sentence that says why."""
        self.gone: set[int] = set(before.gone) if before else set()
        """Slots of `lost` that were emptied before they left: nothing was lost with them."""
        self.heard_at_s: dict[int, float] = {}
        """Time at which each slot last said anything, on `clock`."""
        self.heartbeats: dict[int, Heartbeat] = {}
        self.unused: Counter[str] = Counter()
        """Number of messages that came too late to be used, by class."""
        self._roles: dict[int, tuple[RoleName, ...]] = {}
        self._pids: dict[int, int] = {}
        self._transport = transport
        self._clock, self._on_error = clock, on_error
        self._sequence: Iterator[int] = before._sequence if before else itertools.count(1)
        self._pending: dict[int, _PendingReply] = {}
        self._listeners: list[SlotListener] = []
        self._watchers: list[Watcher] = []
        transport.listen(self._deliver)

    def next_epoch(self) -> int:
        """The number of a new membership: every command from now on carries it."""
        self.epoch += 1
        return self.epoch

    async def ask(self, slot: int, command: Command, deadline_s: float) -> Reply:
        """Send a command and wait for its reply. Raises `SlotLost`, `Late`, or the class of `Refused` that a
        `Failed` names."""
        return await self._ask(slot, Parcel(command), deadline_s)

    async def ask_all(
        self, commands: Mapping[int, Command], deadline_s: float, after_failure_s: float | None = None
    ) -> dict[int, Outcome]:
        """Ask several slots at once; one outcome each, never an exception.

        Commands that run collectives cannot finish without all slots: with `after_failure_s`, the first failure
        gives the others that long before they count as late. The same command for several slots is encoded once.
        """
        parcels = {id(command): Parcel(command) for command in commands.values()}
        asked = {
            asyncio.create_task(self._outcome(slot, parcels[id(command)], deadline_s)): slot
            for slot, command in commands.items()
        }
        waiting = set(asked)
        now_s, give_up_at_s = asyncio.get_running_loop().time, None
        try:
            while waiting:
                patience_s = None if give_up_at_s is None else max(0.0, give_up_at_s - now_s())
                done, waiting = await asyncio.wait(waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                failed = any(isinstance(task.result(), Exception) for task in done)
                if failed and after_failure_s is not None and give_up_at_s is None:
                    give_up_at_s = now_s() + after_failure_s
        finally:
            for task in waiting:
                task.cancel()
        return {
            slot: Late(
                f"{self.describe(slot)} had not replied to {type(commands[slot]).__name__} when another slot failed",
                slot,
            )
            if task in waiting
            else task.result()
            for task, slot in asked.items()
        }

    def subscribe(self, listener: SlotListener) -> Callable[[], None]:
        """Have `listener(slot, event)` called for every event, `Died` included. Returns how to end that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def watch(self, watcher: Watcher) -> None:
        """Have `watcher(slot, command)` called with the class of the command that a slot is at, whenever that changes;
        None where it is at none."""
        self._watchers.append(watcher)

    def lose(self, slot: int, reason: str, is_gone: bool = False) -> None:
        """Give a slot up: all that is asked of it fails at once, now and later. The first reason stays. is_gone: it was
        emptied before."""
        if slot in self.lost:
            return
        self.lost[slot] = reason
        if is_gone:
            self.gone.add(slot)
        for pending in self._pending.values():
            if pending.slot == slot and not pending.future.done():
                pending.future.set_exception(SlotLost(reason, slot))
        self._tell(slot, Died(reason))

    def welcome(self, slot: int) -> None:
        """A new process is about to be this slot: nothing is known of it, whatever became of an earlier one."""
        self.lost.pop(slot, None)
        self.gone.discard(slot)
        for known in (self.heard_at_s, self.heartbeats, self._roles, self._pids):
            known.pop(slot, None)

    def roles(self, slot: int) -> tuple[RoleName, ...]:
        """Roles that the slot was told to take, in the order in which it was told."""
        return self._roles.get(slot, ())

    def silent_for_s(self, slot: int) -> float:
        """Seconds since the slot last said anything; 0 for one that never did (starting has its own deadline)."""
        now = self._clock()
        return now - self.heard_at_s.get(slot, now)

    def describe(self, slot: int) -> str:
        """ "slot 2 (generate, pid 123)"."""
        pid = self._pids.get(slot)
        about = [*self.roles(slot), *([f"pid {pid}"] if pid else [])]
        return f"slot {slot} ({', '.join(about)})" if about else f"slot {slot}"

    def doing(self, slot: int) -> str:
        """Return what the slot was last known to do: "running ForwardBackward", "idle"."""
        beat = self.heartbeats.get(slot)
        command = self._running(slot)
        what = command.__name__ if command else beat.busy_with if beat else ""
        return f"running {what}" if what else "idle"

    def _deliver(self, slot: int, envelope: Envelope) -> None:
        if slot in self.lost:
            self.unused[type(envelope.body).__name__] += 1
            return
        self.heard_at_s[slot] = self._clock()
        body = envelope.body
        match body:
            case Heartbeat():
                self.heartbeats[slot] = body
            case Hello(pid):
                self._pids[slot] = pid
            case _:
                pass
        if isinstance(body, Event):
            self._tell(slot, body)
        else:
            pending = self._pending.get(envelope.seq)
            if pending and pending.slot == slot and isinstance(body, Reply) and not pending.future.done():
                pending.future.set_result(body)
            else:
                self.unused[type(body).__name__] += 1

    def _tell(self, slot: int, event: SlotEvent) -> None:
        # Through the loop: a task that waits for a reply goes on before any listener hears of the event.
        for listener in self._listeners:
            asyncio.get_running_loop().call_soon(self._call, listener, slot, event)

    def _call(self, listener: SlotListener, slot: int, event: SlotEvent) -> None:
        try:
            listener(slot, event)
        except Exception as error:
            sentence = f"what {self.describe(slot)} said ({type(event).__name__}) could not be taken in"
            self._on_error(sentence, error)

    async def _ask(self, slot: int, parcel: Parcel, deadline_s: float) -> Reply:
        command = parcel.command
        if slot in self.lost:
            raise SlotLost(self.lost[slot], slot)
        sequence = next(self._sequence)
        pending = _PendingReply(slot, command, asyncio.get_running_loop().create_future())
        self._pending[sequence] = pending
        self._roles[slot] = command.roles_after(self.roles(slot))
        self._show_running(slot)
        try:
            async with asyncio.timeout(deadline_s):
                await self._transport.post(slot, self.epoch, sequence, parcel)
                reply = await pending.future
        except TimeoutError:
            raise Late(self._late_sentence(slot, command, deadline_s), slot) from None
        finally:
            del self._pending[sequence]
            self._show_running(slot)
        if isinstance(reply, Failed):
            raise self.refused(slot, reply)
        return reply

    def refused(self, slot: int, failed: Failed) -> Refused:
        """Return what a slot says of a failure, as the class that its code names."""
        refused = REFUSALS.get(failed.code, Refused)(f"{self.describe(slot)}: {failed.error}", slot)
        if failed.traceback:
            refused.add_note(failed.traceback)
        return refused

    async def _outcome(self, slot: int, parcel: Parcel, deadline_s: float) -> Outcome:
        try:
            return await self._ask(slot, parcel, deadline_s)
        except Failure as error:
            return error

    def _running(self, slot: int) -> type[Command] | None:
        """The oldest command without a reply: slots execute them in order. What a slot does beside that counts where
        it does nothing else."""
        pending = [pending.command for pending in self._pending.values() if pending.slot == slot]
        command = next((command for command in pending if not command.is_beside), next(iter(pending), None))
        return type(command) if command else None

    def _show_running(self, slot: int) -> None:
        for watcher in self._watchers:
            watcher(slot, self._running(slot))

    def _late_sentence(self, slot: int, command: Command, deadline_s: float) -> str:
        sentence = f"{self.describe(slot)} did not reply to {type(command).__name__} within {said(deadline_s)}"
        beat = self.heartbeats.get(slot)
        if beat and beat.busy_with:
            sentence += f"; it has been busy with {beat.busy_with} for {beat.busy_for_s:.0f} s"
        return sentence
