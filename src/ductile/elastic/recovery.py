"""A lost generator or scorer comes back: its slot is started anew, takes its roles and the live weights, and works on.

    lost        its requests begin again elsewhere, or wait; the event `slot_lost` says how it ended
    pause       none before the first attempt, then 1 s, 2 s, 4 s and so on up to LONGEST_PAUSE_S
    start       a process, then `AssignRole` and the live weights for each role: each within its own deadline
    restarted   the event `slot_restarted`
    given back  after `cluster.max_restarts` attempts in a row: the event `slot_given_back`, and the run goes on without

Attempts are in a row until the slot has worked for LASTS_S. A slot that changes roles when it is lost is left alone
until that change is over. What trains is not brought back: the run ends with it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType

from ductile.cluster.cluster import Cluster, StartFailed
from ductile.concurrency.background import start_reported
from ductile.core.instances.instances import Instance, Serving, instance_on
from ductile.error_text import capitalised
from ductile.fleet.trainer import RemoteTrainer
from ductile.fleet.worker_pool import WorkerPool
from ductile.messages.workers import Died, Event
from ductile.observe import Recorder
from ductile.roles import Failure

LONGEST_PAUSE_S = 30.0
LASTS_S = 60.0
VERBS: dict[Serving, str] = {"generate": "generates", "score": "scores"}


def pause_s(num_attempts: int) -> float:
    """Seconds before the next attempt to start a slot, after so many in a row."""
    return min(LONGEST_PAUSE_S, 2.0 ** (num_attempts - 1)) if num_attempts else 0.0


class Recovery:
    """Works within `async with`; what it has begun is given up at the end."""

    def __init__(
        self,
        cluster: Cluster,
        trainer: RemoteTrainer,
        pools: Mapping[Serving, WorkerPool],
        settings: Mapping[Serving, Mapping[str, object]],
        record: Recorder,
        max_restarts: int,
        change_over: Callable[[int], Awaitable[None]],
        is_scheduled: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """settings: of the roles. change_over: returns when the slot does not change roles. is_scheduled: a policy may
        give the role of a slot that is given back to another one."""
        self._cluster, self._trainer, self._pools, self._settings = cluster, trainer, pools, settings
        self._record, self._max_restarts, self._clock = record, max_restarts, clock
        self._change_over, self._is_scheduled = change_over, is_scheduled
        self._restarting: dict[int, tuple[Serving, ...]] = {}
        """Roles of the slots that are lost and to come back."""
        self._num_restarted: Counter[int] = Counter()
        """Number of instances that were begun anew, by slot; their ids end in it."""
        self._num_attempts: Counter[int] = Counter()
        """Attempts in a row, by slot."""
        self._works_since_s: dict[int, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        cluster.mailbox.subscribe(self._on_event)

    async def __aenter__(self) -> "Recovery":
        for slot, reason in self._cluster.mailbox.lost.items():  # since the slots got their roles
            self._on_event(slot, Died(reason))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def under_way(self) -> frozenset[int]:
        """Slots that are lost and to come back; nobody else gives them a role."""
        return frozenset(self._restarting)

    def _on_event(self, slot: int, event: Event) -> None:
        held = self._cluster.mailbox.roles(slot)
        roles = tuple(role for role in self._pools if held.count(role))
        if not isinstance(event, Died) or not roles or slot in self._restarting or self._cluster.depends_on(slot):
            return
        self._restarting[slot] = roles
        if self._clock() - self._works_since_s.get(slot, self._clock()) > LASTS_S:
            self._num_attempts[slot] = 0
        sentence = f"slot {slot} could not be started again"
        task = start_reported(self._bring_back(slot, roles, event.reason), sentence, self._cluster.fail_with)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_back(self, slot: int, roles: Sequence[Serving], why: str) -> None:
        began_s = self._clock()
        try:
            await self._change_over(slot)
            while slot in self._cluster.mailbox.lost:  # unless the change has started it anew
                if self._num_attempts[slot] >= self._max_restarts:
                    self._retire(slot, roles, why)
                    return
                await asyncio.sleep(pause_s(self._num_attempts[slot]))
                self._num_attempts[slot] += 1
                try:
                    instances = await self._restart(slot, roles)
                except (Failure, StartFailed) as error:
                    why = str(error)
                    self._cluster.condemn(slot, f"{why}; it has been killed")
                else:
                    self._note(slot, roles, instances, self._clock() - began_s)
        finally:
            del self._restarting[slot]

    async def _restart(self, slot: int, roles: Sequence[Serving]) -> list[Instance]:
        await self._cluster.add([slot])
        self._num_restarted[slot] += 1
        instances = [instance_on(role, (slot,), restart=self._num_restarted[slot]) for role in roles]
        for instance in instances:
            pool = self._pools[instance.role]
            takes_work = await pool.admit(instance, self._settings[instance.role])
            if not takes_work and pool.version is not None and not pool.instances:
                await self._publish_again(pool, pool.version)
        self._works_since_s[slot] = self._clock()
        return instances

    async def _publish_again(self, pool: WorkerPool, version: int) -> None:
        """No slot has the live version any more: the last one was lost while the trainer was between two optimizer
        steps of a batch. Its weights of this moment go live in their place, or it would wait for work for ever."""
        if manifest := await self._trainer.publish_again(version):
            try:
                await pool.receive(manifest)
            finally:
                await self._trainer.withdraw(version)

    def _note(self, slot: int, roles: Sequence[Serving], instances: Sequence[Instance], seconds: float) -> None:
        device, pid = self._cluster.devices[slot], self._cluster.processes[slot].pid
        does = " and ".join(VERBS[role] for role in roles)
        self._record.event(
            "slot_restarted",
            f"Slot {slot} {does} again after {seconds:.2f} s, on {device}, pid {pid}.",
            slot=slot,
            roles=roles,
            device=device,
            pid=pid,
            seconds=round(seconds, 3),
            num_attempts=self._num_attempts[slot],
            began=[asdict(instance) for instance in instances],
        )

    def _retire(self, slot: int, roles: Sequence[Serving], why: str) -> None:
        attempts = self._num_attempts[slot]
        tried = f"after {attempts} attempt{'s' * (attempts != 1)} to start it again (cluster.max_restarts)"
        self._record.event("slot_given_back", f"Slot {slot} is given back {tried}: {why}.", slot=slot, roles=roles)
        for role in roles:
            coming = any(role in others for other, others in self._restarting.items() if other != slot)
            if not (self._is_scheduled or coming or self._pools[role].all_instances):
                self._cluster.fail(f"{capitalised(why)}; slot {slot} was given back {tried}, and no slot {VERBS[role]}")
