"""The slots of a role that work each for itself (generate, score): who takes work, who comes, who goes.

    slots      have the live version and take work
    draining   take no more work, and finish what they have
    waiting    have the role without weights: no slot has the live version any more, so the next one is their first

A version goes live on all of them while no slot joins, so no slot ends up on another version.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ductile.records import Manifest
from ductile.roles import Late, SlotLost
from ductile.wire.background import finish
from ductile.wire.change_signal import ChangeSignal
from ductile.wire.fanout import raise_worst
from ductile.wire.leases import FAILURES, Serving, WeightLeases
from ductile.wire.mailbox import Mailbox
from ductile.wire.messages import AssignRole, Died, Event, Receive, ReleaseRole
from ductile.wire.read_write_lock import ReadWriteLock


class WorkerPool:
    def __init__(
        self,
        mailbox: Mailbox,
        role: Serving,
        slots: Sequence[int],
        timeout_s: float,
        leases: WeightLeases | None,
        depends_on: Callable[[int], bool],
    ) -> None:
        """leases: None where no slot ever joins. depends_on: whether the run ends when this slot is lost."""
        self.slots = tuple(slots)
        self.version: int | None = None
        """Version that is live; None before the first."""
        self.num_waiting = 0
        """Calls of `some` that wait for a slot."""
        self.lock = ReadWriteLock(timeout_s)
        self.on_change: Callable[[], None] = lambda: None
        """Called when `slots` have changed, or a call of `some` begins to wait for one."""
        self.depends_on = depends_on
        self._mailbox, self._timeout_s, self._leases = mailbox, timeout_s, leases
        self._role: Serving = role
        self._draining: set[int] = set()
        self._waiting: set[int] = set()
        self._joining: set[int] = set()
        self._changed = ChangeSignal()
        mailbox.subscribe(self._on_event)

    @property
    def members(self) -> tuple[int, ...]:
        """All slots that hold the role, in ascending order."""
        return tuple(sorted({*self.slots, *self._draining, *self._waiting}))

    @property
    def serving(self) -> tuple[int, ...]:
        """Slots that have weights: they can work, though the draining ones get nothing new."""
        return tuple(sorted({*self.slots, *self._draining}))

    async def some(self, what: str) -> tuple[int, ...]:
        """The slots that take work, at least one. Raises Late when none comes. what: the work, such as "12 samples"."""
        if not self.slots:
            self.num_waiting += 1
            self.on_change()
            try:
                await self._changed.wait_for(lambda: bool(self.slots), self._timeout_s)
            except TimeoutError:
                raise Late(f"for {self._timeout_s:g} s no slot had the role {self._role!r}, for {what}") from None
            finally:
                self.num_waiting -= 1
        return self.slots

    async def admit(self, slot: int, settings: Mapping[str, object]) -> bool:
        """Have the slot take the role and the live weights. True: it takes work. False: it does from the next version
        on. Raises SlotLost, Refused or Late, and the slot then has no role."""
        if self._leases is None:
            raise ValueError(f"slot {slot} cannot take the role {self._role!r}: there are no weight leases here")
        if slot in self.members or slot in self._joining:
            raise ValueError(f"slot {slot} has the role {self._role!r} already")
        self._joining.add(slot)
        try:
            assign = AssignRole(self._role, dict(settings), (slot,), joining=True)
            await self._mailbox.ask(slot, assign, self._timeout_s)
            async with self.lock.shared(f"slot {slot} joins the role {self._role!r}"):
                version = self.version
                takes_work = version is not None and await self._leases.give(self._role, slot, version)
                if slot in self._mailbox.lost:
                    raise SlotLost(self._mailbox.lost[slot])
                if takes_work:
                    self._set((*self.slots, slot))
                else:
                    self._waiting.add(slot)
                return takes_work
        except BaseException:
            await finish(self._release_half_joined(slot))
            raise
        finally:
            self._joining.remove(slot)

    def drain(self, slot: int) -> None:
        """The slot takes no more work. Nothing happens when it does not take any."""
        if slot in self.slots:
            self._draining.add(slot)
            self._set([other for other in self.slots if other != slot])

    def resume(self, slot: int) -> None:
        """A draining slot takes work again."""
        if slot in self._draining:
            self._draining.remove(slot)
            self._set((*self.slots, slot))

    async def release(self, slot: int) -> None:
        """Have the slot release the role. Nothing happens when it does not have it, or is lost."""
        if slot not in self.members:
            return
        self.drain(slot)
        async with self.lock.shared(f"slot {slot} leaves the role {self._role!r}"):
            if slot in self.members:
                self._forget(slot)
                await self._mailbox.ask(slot, ReleaseRole(self._role), self._timeout_s)

    async def receive(self, manifest: Manifest) -> None:
        """Returns when the version is live on every member. Raises SlotLost, Refused or Late."""
        async with self.lock.exclusive(f"version {manifest.version} goes live"):
            commands = dict.fromkeys(self.members, Receive(self._role, manifest))
            outcomes = await self._mailbox.ask_all(commands, self._timeout_s)
            raise_worst(
                {
                    slot: outcome
                    for slot, outcome in outcomes.items()
                    if not isinstance(outcome, SlotLost) or self.depends_on(slot)
                }
            )
            self.version = manifest.version
            for slot in self.members:
                if self._leases is not None and slot in outcomes and not isinstance(outcomes[slot], SlotLost):
                    self._leases.note(self._role, slot, manifest.version)
            if self._waiting:
                self._set({*self.slots, *self._waiting})
                self._waiting.clear()

    def _on_event(self, slot: int, event: Event) -> None:
        if isinstance(event, Died) and slot in self.members:
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        self._draining.discard(slot)
        self._waiting.discard(slot)
        if self._leases is not None:
            self._leases.forget(self._role, slot)
        if slot in self.slots:
            self._set([other for other in self.slots if other != slot])

    def _set(self, slots: Sequence[int] | set[int]) -> None:
        self.slots = tuple(sorted(slots))
        self._changed.notify_all()
        self.on_change()

    async def _release_half_joined(self, slot: int) -> None:
        if self._leases is not None:
            self._leases.forget(self._role, slot)
        with suppress(*FAILURES):  # it may not even have taken the role
            if slot not in self._mailbox.lost:
                await self._mailbox.ask(slot, ReleaseRole(self._role), self._timeout_s)


def any_slot(slot: int) -> bool:
    """`depends_on` of a run that ends with any of its slots."""
    return True
