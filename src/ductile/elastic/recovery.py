"""A lost generator or scorer comes back: its slot is started anew, takes its roles and the live weights, and works on.

    lost        its requests begin again elsewhere, or wait; the event `slot_lost` says how it ended
                and `slot_restarting` that it is to come back
    pause       none before the first attempt, then 1 s, 2 s, 4 s and so on up to LONGEST_PAUSE_S
    start       a process, then `AssignRole` and the live weights for each role: each within its own deadline
    restarted   the event `slot_restarted`
    given back  after `cluster.max_restarts` attempts in a row: the event `slot_given_back`, and the run goes on without

Attempts are in a row until the slot has worked for LASTS_S. A slot that changes roles when it is lost is left alone
until that change is over; where a policy moves the slots, one that was lost between two roles comes back without any.
What trains is not brought back: the run ends with it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from types import TracebackType

from ductile.cluster.cluster import Cluster, StartFailed
from ductile.concurrency.background import start_reported
from ductile.concurrency.listeners import Listeners
from ductile.core.instances.instances import Instance, Serving, instance_on
from ductile.error_text import capitalised
from ductile.events.slots import SlotGivenBack, SlotRestarted, SlotRestarting
from ductile.fleet.fleet import Fleet
from ductile.observe import Recorder
from ductile.roles import Failure
from ductile.transport.mailbox import Died, SlotEvent

LONGEST_PAUSE_S = 30.0
LASTS_S = 60.0
GIVE_UP_S = 1.0
"""Seconds that restarts have to end once the run ends."""
VERBS: dict[Serving, str] = {"generate": "generates", "score": "scores"}


def pause_s(num_attempts: int) -> float:
    """Seconds before the next attempt to start a slot, after so many in a row."""
    return min(LONGEST_PAUSE_S, 2.0 ** (num_attempts - 1)) if num_attempts else 0.0


class Recovery:
    """Works within `async with`; what it has begun is given up at the end."""

    def __init__(
        self,
        cluster: Cluster,
        fleet: Fleet,
        record: Recorder,
        max_restarts: int,
        change_over: Callable[[int], Awaitable[None]],
        is_scheduled: bool,
        replaced: Collection[Serving] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """change_over: returns when the slot does not change roles. is_scheduled: a policy moves the slots. replaced:
        roles of a slot that is given back which the policy gives to others."""
        self.on_change = Listeners[[]]()
        """Told when a slot is not `under_way` any more: it is back, given back, or left to a resize."""
        self._cluster, self._fleet = cluster, fleet
        self._record, self._max_restarts, self._clock = record, max_restarts, clock
        self._change_over, self._is_scheduled, self._replaced = change_over, is_scheduled, frozenset(replaced)
        self._restarting: dict[int, tuple[Serving, ...]] = {}
        """Roles of the slots that are lost and to come back."""
        self._num_restarted: Counter[int] = Counter()
        """Number of instances that were begun anew, by slot; their ids end in it."""
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
        """Slots that are lost and to come back; policies do not give them a role."""
        return frozenset(self._restarting)

    def _on_event(self, slot: int, event: SlotEvent) -> None:
        held = self._cluster.mailbox.roles(slot)
        roles: tuple[Serving, ...] = tuple(role for role in self._fleet.pools if held.count(role))
        if not isinstance(event, Died) or slot in self._restarting or self._cluster.has_failed:
            return
        if not roles and not self._is_scheduled:
            return
        self._restarting[slot] = roles
        self._record.event(SlotRestarting(slot))
        if self._clock() - self._works_since_s.get(slot, self._clock()) > LASTS_S:
            self._num_attempts[slot] = 0
        sentence = f"slot {slot} could not be started again"
        task = start_reported(self._bring_back(slot, roles, event.reason), sentence, self._cluster.fail_with)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_back(self, slot: int, roles: Sequence[Serving], why: str) -> None:
        """roles: those that it had. A slot that was between two roles comes back without one, for the policy to use."""
        began_s, has_paused = self._clock(), False
        try:
            while True:
                await self._change_over(slot)
                missing: list[Serving] = [role for role in roles if self._fleet.pools[role].on(slot) is None]
                if slot not in self._cluster.mailbox.lost and (self._is_scheduled or not missing):
                    return  # a change has started it, and the policy gives it what roles it has
                if self._num_attempts[slot] >= self._max_restarts:
                    self._retire(slot, roles, why)
                    return
                if not has_paused:
                    await asyncio.sleep(pause_s(self._num_attempts[slot]))
                    has_paused = True
                    continue  # a change may have begun meanwhile
                self._num_attempts[slot] += 1
                has_paused = False
                try:
                    instances = await self._restart(slot, missing)
                except (Failure, StartFailed) as error:
                    why = str(error)
                    if not self._cluster.depends_on(slot):
                        self._cluster.condemn(slot, f"{why}; it has been killed")
                    continue
                if died_again := self._cluster.mailbox.lost.get(slot):
                    why = died_again  # its death was not listened to, as the slot was still under way
                    continue
                self._note(slot, roles, instances, self._clock() - began_s)
                return
        finally:
            del self._restarting[slot]
            self.on_change()

    async def _restart(self, slot: int, roles: Sequence[Serving]) -> list[Instance]:
        await self._cluster.add([slot])
        self._num_restarted[slot] += 1
        instances = [instance_on(role, (slot,), restart=self._num_restarted[slot]) for role in roles]
        for instance in instances:
            await self._fleet.admit(instance)
        self._works_since_s[slot] = self._clock()
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
            began=tuple(instances),
            sentence=f"Slot {slot} {does} again after {seconds:.2f} s, on {device}, pid {pid}.",
        )
        self._record.event(restarted)

    def _retire(self, slot: int, roles: Sequence[Serving], why: str) -> None:
        attempts = self._num_attempts[slot]
        tried = f"after {attempts} attempt{'s' * (attempts != 1)} to start it again (cluster.max_restarts)"
        self._record.event(SlotGivenBack(slot, tuple(roles), sentence=f"Slot {slot} is given back {tried}: {why}."))
        for role in roles:
            coming = any(role in others for other, others in self._restarting.items() if other != slot)
            if not (self._is_replaced(role, slot) or coming or self._fleet.pools[role].all_instances):
                self._cluster.fail(f"{capitalised(why)}; slot {slot} was given back {tried}, and no slot {VERBS[role]}")

    def _is_replaced(self, role: Serving, without: int) -> bool:
        """Whether the policy gives the role to another slot: it takes none from the last one that can train."""
        mailbox, coming = self._cluster.mailbox, self._restarting.keys() - {without}
        there = [slot for slot in self._cluster.slots if slot not in mailbox.lost or slot in coming]
        return role in self._replaced and sum(mailbox.roles(slot) != ("score",) for slot in there) > 1
