"""A lost generator or scorer comes back: its slots that are gone are started anew, and it takes its role and the live
weights on all of its slots, and works on.

    lost        its requests begin again elsewhere, or wait; the event `slot_lost` says how it ended
    change      over, if it changed roles; the event `slot_restarting` says that it is to come back
    pause       none before the first attempt, then 1 s, 2 s, 4 s and so on up to LONGEST_PAUSE_S
    start       a process, then `AssignRole` and the live weights for each role: each within its own deadline
    restarted   the event `slot_restarted`
    given back  after `cluster.max_restarts` attempts in a row: the event `slot_given_back`, and the run goes on without

Attempts are in a row until the slot has worked for LASTS_S. A slot that changes roles when it is lost is left alone
until that change is over; where a policy moves the slots, one that was lost between two roles comes back without any.
Slots that had a scorer together with one that is lost wait for it; what they do besides goes on. What trains is not
brought back: the run ends with it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType

from ductile.cluster.cluster import Cluster, StartFailed
from ductile.concurrency.background import start_reported
from ductile.concurrency.listeners import Listeners
from ductile.core.instances.instances import Instance, Serving, instance_on
from ductile.error_text import capitalised
from ductile.events.slots import SlotGivenBack, SlotRestarted, SlotRestarting
from ductile.fleet.run_roles import RunRoles
from ductile.observe import Recorder
from ductile.roles import Failure
from ductile.transport.mailbox import Died, SlotEvent

LONGEST_PAUSE_S = 30.0
LASTS_S = 60.0
GIVE_UP_S = 1.0
"""Seconds that restarts have to end once the run ends."""
VERBS: dict[Serving, str] = {"generate": "generates", "score": "scores"}


def _failed(error: Failure | StartFailed, gone: Collection[int], slots: Collection[int]) -> Collection[int]:
    """Which of the slots that were to come back together are to be started anew at the next attempt: those that were
    gone, if they did not start; else the one that failed, from which the failures of the others follow, and all where
    it is none of them."""
    if isinstance(error, StartFailed):
        return gone
    return [slot for slot in slots if slot == error.slot] or slots


def pause_s(num_attempts: int) -> float:
    """Seconds before the next attempt to start a slot, after so many in a row."""
    return min(LONGEST_PAUSE_S, 2.0 ** (num_attempts - 1)) if num_attempts else 0.0


class Recovery:
    """Works within `async with`; what it has begun is given up at the end."""

    def __init__(
        self,
        cluster: Cluster,
        fleet: RunRoles,
        record: Recorder,
        max_restarts: int,
        change_over: Callable[[int], Awaitable[None]],
        is_scheduled: bool,
        replaced: Collection[Serving] = (),
        clock: Callable[[], float] = time.monotonic,
        groups: Callable[[Serving], Iterable[tuple[int, ...]]] = lambda role: (),
    ) -> None:
        """change_over: returns when the slot does not change roles. is_scheduled: a policy moves the slots. replaced:
        roles of a slot that is given back which the policy gives to others. groups: slots that an instance of a role
        may be on; what is in none of them is an instance's only slot."""
        self.on_change = Listeners[[]]()
        """Told when a slot is not `under_way` any more: it is back, given back, or left to a resize."""
        self._cluster, self._fleet = cluster, fleet
        self._record, self._max_restarts, self._clock = record, max_restarts, clock
        self._change_over, self._is_scheduled, self._replaced = change_over, is_scheduled, frozenset(replaced)
        self._groups = groups
        self._restarting: dict[int, tuple[Serving, ...]] = {}
        """Roles that slots are to have back: those that are lost, and those that had an instance with one of them."""
        self._gone: set[int] = set()
        """Those of `_restarting` whose processes are gone."""
        self._announced: set[int] = set()
        """Those of `_gone` of which an event says that they are to come back."""
        self._num_restarted: Counter[int] = Counter()
        """Number of restarts that a slot had a part in; ids of the instances that began in them end in it."""
        self._num_attempts: Counter[int] = Counter()
        """Attempts in a row, by slot."""
        self._works_since_s: dict[int, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsubscribe: Callable[[], None] = lambda: None

    async def __aenter__(self) -> "Recovery":
        self._unsubscribe = self._cluster.mailbox.subscribe(self._on_event)
        for slot, reason in self._cluster.mailbox.lost.items():  # since the slots got their roles
            self._on_event(slot, Died(reason))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up what is under way. It is not waited for: a slot may hang in the middle of it, and all slots are about
        to be stopped."""
        self._unsubscribe()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GIVE_UP_S)

    @property
    def under_way(self) -> frozenset[int]:
        """Slots that are lost and to come back, and those that wait for them; policies do not give them a role."""
        return frozenset(self._restarting)

    def _on_event(self, slot: int, event: SlotEvent) -> None:
        if not isinstance(event, Died) or self._cluster.has_failed or slot in self._cluster.mailbox.gone:
            return
        if slot in self._restarting:
            self._gone.add(slot)
            return
        roles = self._roles(slot)
        if not roles and not self._is_scheduled:
            return
        concerned = {slot: roles}
        for role in roles:
            for other in set(self._group(role, slot)).difference(concerned, self._restarting):
                concerned[other] = tuple(
                    each for each in self._fleet.pools if each == role or each in self._roles(other)
                )
        self._restarting |= concerned
        self._gone.add(slot)
        for each in concerned:
            if self._clock() - self._works_since_s.get(each, self._clock()) > LASTS_S:
                self._num_attempts[each] = 0
        sentence = f"slot {slot} could not be started again"
        task = start_reported(self._bring_back(slot, concerned, event.reason), sentence, self._cluster.fail_with)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _roles(self, slot: int) -> tuple[Serving, ...]:
        held = self._cluster.mailbox.roles(slot)
        return tuple(role for role in self._fleet.pools if role in held)

    def _group(self, role: Serving, slot: int) -> tuple[int, ...]:
        """The slots of the instance that can be on this slot."""
        return next((group for group in self._groups(role) if slot in group), (slot,))

    async def _bring_back(self, slot: int, roles: Mapping[int, tuple[Serving, ...]], why: str) -> None:
        """roles: those that the slot and the others which it has instances with had. Where the slot was between two
        roles it comes back without one, for the policy to use."""
        began_s, has_paused = self._clock(), False
        lost = self._cluster.mailbox.lost
        try:
            while True:
                for each in roles:
                    await self._change_over(each)
                if self._cluster.has_failed:
                    return  # the change has ended the run: what it lost cannot be replaced
                if not self._cluster.mailbox.gone.isdisjoint(roles):
                    return  # it was to be gone when it was to come back
                missing = self._missing(roles)
                if lost.keys().isdisjoint(roles) and (self._is_scheduled or not missing):
                    return  # a change has started it, and the policy gives it what roles it has
                if self._num_attempts[slot] >= self._max_restarts:
                    self._retire(slot, roles, why)
                    return
                self._announce(roles)
                if not has_paused:
                    await asyncio.sleep(pause_s(self._num_attempts[slot]))
                    has_paused = True
                    continue  # a change may have begun meanwhile
                has_paused = False
                for each in roles:
                    self._num_attempts[each] += 1
                gone = [each for each in roles if each in lost]
                try:
                    await self._cluster.add(sorted(roles))
                    instances = await self._begin(roles, missing)
                except (Failure, StartFailed) as error:
                    why = str(error)
                    for each in _failed(error, gone, roles):
                        if not self._fleet.trainer.needs(each):
                            self._cluster.condemn(each, f"{why}; it has been killed")
                    continue
                if died_again := next((lost[each] for each in roles if each in lost), ""):
                    why = died_again  # its death was not listened to, as the slot was still under way
                    continue
                self._announce(roles)  # of one that was lost after the others
                for each in sorted(self._gone.intersection(roles)):
                    self._note(each, roles[each], instances, self._clock() - began_s)
                return
        finally:
            for each in roles:
                del self._restarting[each]
                self._gone.discard(each)
                self._announced.discard(each)
            self.on_change()

    def _announce(self, slots: Collection[int]) -> None:
        for slot in sorted(self._gone.intersection(slots) - self._announced):
            self._announced.add(slot)
            self._record.event(SlotRestarting(slot))

    def _missing(self, roles: Mapping[int, tuple[Serving, ...]]) -> list[tuple[Serving, tuple[int, ...]]]:
        """Instances that are to begin anew: each a role, and slots without it, which are all at hand."""
        wanted: dict[tuple[Serving, tuple[int, ...]], None] = {
            (role, self._group(role, slot)): None for slot, held in roles.items() for role in held
        }
        return [
            (role, group)
            for role, group in wanted
            if roles.keys() >= {*group} and not any(self._fleet.pools[role].on(slot) for slot in group)
        ]

    async def _begin(
        self, slots: Collection[int], missing: Sequence[tuple[Serving, tuple[int, ...]]]
    ) -> list[Instance]:
        for slot in slots:
            self._num_restarted[slot] += 1
        instances = [instance_on(role, group, restart=self._num_restarted[group[0]]) for role, group in missing]
        for instance in instances:
            await self._fleet.admit(instance)
        self._works_since_s |= dict.fromkeys(slots, self._clock())
        return instances

    def _note(self, slot: int, roles: Sequence[Serving], instances: Sequence[Instance], seconds: float) -> None:
        device, pid = self._cluster.devices[slot], self._cluster.processes[slot].pid
        does = " and ".join(VERBS[role] for role in roles) or "runs"
        restarted = SlotRestarted(
            slot=slot,
            roles=tuple(roles),
            device=device,
            pid=pid,
            seconds=round(seconds, 3),
            num_attempts=self._num_attempts[slot],
            began=tuple(each for each in instances if slot in each.slots),
            node=self._cluster.node_of(slot),
            sentence=f"Slot {slot} {does} again after {seconds:.2f} s, on {device}, pid {pid}.",
        )
        self._record.event(restarted)

    def _retire(self, slot: int, roles: Mapping[int, Sequence[Serving]], why: str) -> None:
        """Give the slots back that are gone. The others are without what they had together with these."""
        attempts = self._num_attempts[slot]
        tried = f"after {attempts} attempt{'s' * (attempts != 1)} to start it again (cluster.max_restarts)"
        for each in sorted(self._gone.intersection(roles)):
            given_back = SlotGivenBack(each, tuple(roles[each]), sentence=f"Slot {each} is given back {tried}: {why}.")
            self._record.event(given_back)
        for role in self._fleet.pools:
            of_role = [each for each in roles if role in roles[each]]
            coming = any(role in others for other, others in self._restarting.items() if other not in roles)
            if of_role and not (self._is_replaced(role, of_role) or coming or self._fleet.pools[role].all_instances):
                self._cluster.fail(f"{capitalised(why)}; slot {slot} was given back {tried}, and no slot {VERBS[role]}")

    def _is_replaced(self, role: Serving, without: Collection[int]) -> bool:
        """True when the policy gives the role to another slot: it takes none from the last one that can train."""
        mailbox, coming = self._cluster.mailbox, self._restarting.keys() - {*without}
        there = [slot for slot in self._cluster.slots if slot not in mailbox.lost or slot in coming]
        return role in self._replaced and sum(mailbox.roles(slot) != ("score",) for slot in there) > 1
