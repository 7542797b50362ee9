"""Slots that will be gone by a deadline are emptied before that, and end.

    notice      `ductile drain`, or SIGTERM to a slot's process: the event `slot_noticed`
    empty       rollouts migrate, the trainer is resized, scorers move: as `ductile.core.scheduling.drains` decides
    withdrawn   what others fetch from the slot has been fetched
    gone        its process has left: the event `slot_gone`. It is not started again, and no policy uses it
    back        `ductile drain --back`: a new process, with what it held, or for the policy to use: `slot_back`

A notice that comes before the slots have roles is heeded once they have. What is not done by the deadline, or cannot
be, is told in the event `slot_not_emptied`. Where a part of the trainer's
state is on such a slot, the last whole step is saved at once. The slot works on, and its death is one as any other;
so is that of one that dies before it is gone.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol, Self

from ductile.cluster.cluster import Cluster
from ductile.concurrency.background import finish, start_reported
from ductile.core.instances.placement import slots_of
from ductile.core.scheduling.drains import CannotDrain, Notice
from ductile.error_text import capitalised
from ductile.events.slots import SlotGone, SlotIsBack, SlotNotEmptied, SlotNoticed
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.control import Drained
from ductile.observe import Recorder

ENDING_S = 0.5
"""Seconds after SIGTERM to a slot in which the orchestrator may get one, too: then all of the run is to end."""

BACK_S = 300.0
"""The longest that slots which are back wait for what they held."""


class Mover(Protocol):
    """Moves what slots hold: `ductile.elastic.controller.ElasticController`, or `TrainerMover` where there is nothing
    but a trainer."""

    def emptied(self, slots: Collection[int]) -> AbstractAsyncContextManager[set[int]]:
        """Begin the block when the slots hold nothing any more, and give them nothing in it. After it those are gone
        that are left in the set that it gets. Raises CannotDrain."""
        ...

    async def restore(self, slots: Collection[int]) -> None:
        """Use slots again that were gone. Raises CannotDrain."""
        ...


class Drains:
    """Works within `async with`; what is under way is given up at the end."""

    def __init__(
        self,
        cluster: Cluster,
        trainer: RemoteTrainer,
        record: Recorder,
        is_ending: Callable[[], bool],
        mover: Mover | None = None,
    ) -> None:
        """is_ending: whether the run was told to end. mover: None until `begin`."""
        self.save_soon = asyncio.Event()
        """Set when the last whole step is to be saved at once: a part of the trainer's state is about to be lost."""
        self._cluster, self._trainer, self._record = cluster, trainer, record
        self._is_ending, self._mover = is_ending, mover
        self._has_begun = asyncio.Event()
        self._under_way: dict[int, asyncio.Task[Drained]] = {}
        """Drain of each slot that is to be gone."""
        self._tasks: set[asyncio.Task[Drained]] = set()
        self._is_over = False
        cluster.on_notice.add(self._on_notice)

    def begin(self, mover: Mover) -> None:
        """Slots can be emptied from now on."""
        self._mover = mover
        self._has_begun.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ENDING_S)

    @property
    def leaving(self) -> frozenset[int]:
        """Slots that are to be gone, and still there."""
        return frozenset(self._under_way)

    async def drain(self, notice: Notice) -> Drained:
        """Returns when the slots of the notice are gone, as somebody has asked for it. Raises CannotDrain when they
        cannot be, or are not in time. Slots that somebody else drains already are waited for."""
        under_way = {self._under_way[slot] for slot in notice.slots if slot in self._under_way}
        rest = tuple(slot for slot in notice.slots if slot not in self._under_way)
        if rest:
            under_way.add(self._start(Notice(rest, notice.deadline_s, notice.source)))
        await asyncio.wait(under_way)  # all of them, whatever becomes of one
        done = [task.result() for task in under_way]
        if len(done) == 1:
            return done[0]
        return Drained(
            tuple(sorted({slot for each in done for slot in each.slots})),
            max(each.seconds for each in done),
            " ".join(each.sentence for each in done),
        )

    async def bring_back(self, slots: Sequence[int]) -> Drained:
        """Have slots that are gone come back. Raises StartFailed, or CannotDrain where they cannot have what they
        held."""
        if strange := sorted({*slots} - self._cluster.mailbox.gone):
            verb = "is" if len(strange) == 1 else "are"
            raise CannotDrain(f"{slots_of(strange)} {verb} not gone")
        mover = self._require_mover()
        began_s = asyncio.get_running_loop().time()
        await self._cluster.add(sorted(slots))
        try:
            async with asyncio.timeout(BACK_S):
                await mover.restore(slots)
        except TimeoutError:
            raise CannotDrain(f"{slots_of(slots)} run, and did not get what they held within {BACK_S:g} s") from None
        seconds = asyncio.get_running_loop().time() - began_s
        for slot in slots:
            device, pid = self._cluster.devices[slot], self._cluster.processes[slot].pid
            roles = self._cluster.mailbox.roles(slot)
            said = f"Slot {slot} is back after {seconds:.2f} s, on {device}, pid {pid}."
            self._record.event(SlotIsBack(slot, roles, device, pid, self._cluster.node_of(slot), sentence=said))
        verb = "is" if len(slots) == 1 else "are"
        return Drained(tuple(slots), seconds, f"{capitalised(slots_of(slots))} {verb} back.")

    def _on_notice(self, notice: Notice) -> None:
        if not (self._is_over or self._cluster.has_failed):
            start_reported(self._heed(notice), "a notice could not be heeded", self._cluster.fail_with)

    async def _heed(self, notice: Notice) -> None:
        """Drain the slots, unless all of the run is told to end: a batch system signals every process."""
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(ENDING_S)
        slots = tuple(slot for slot in notice.slots if slot not in self._under_way and self._runs(slot))
        if self._is_ending() or self._is_over or not slots:
            return
        left_s = notice.deadline_s - (asyncio.get_running_loop().time() - began_s)
        task = self._start(Notice(slots, max(0.0, left_s), notice.source))
        await asyncio.wait([task])

    def _runs(self, slot: int) -> bool:
        return slot in self._cluster.slots and slot not in self._cluster.mailbox.lost

    def _start(self, notice: Notice) -> "asyncio.Task[Drained]":
        """Raises CannotDrain for slots that are not there."""
        if self._is_over:
            raise CannotDrain("the run ends")
        if absent := [slot for slot in notice.slots if not self._runs(slot)]:
            verb = "does" if len(absent) == 1 else "do"
            raise CannotDrain(f"{slots_of(absent)} {verb} not run")
        task = asyncio.create_task(self._drain(notice))
        self._under_way |= dict.fromkeys(notice.slots, task)
        self._tasks.add(task)

        def forget(task: "asyncio.Task[Drained]") -> None:
            self._tasks.discard(task)
            for slot in notice.slots:
                self._under_way.pop(slot, None)
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Exception) and not isinstance(error, CannotDrain):
                self._cluster.fail_with(f"{slots_of(notice.slots)} could not be emptied", error)

        task.add_done_callback(forget)
        return task

    async def _drain(self, notice: Notice) -> Drained:
        slots, limit_s = notice.slots, notice.deadline_s
        who, verb = capitalised(slots_of(slots)), "is" if len(slots) == 1 else "are"
        said = f"{who} {verb} to be gone within {limit_s:.3g} s ({notice.source})."
        self._record.event(SlotNoticed(slots, round(limit_s, 3), notice.source, sentence=said))
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        held = {slot: self._cluster.mailbox.roles(slot) for slot in slots}
        try:
            async with asyncio.timeout(limit_s) as limit:
                if self._mover is None:
                    await self._has_begun.wait()
                async with self._require_mover().emptied(slots) as gone:
                    emptied_s = now_s() - began_s
                    for slot in slots:
                        await self._trainer.has_withdrawn(slot, limit_s)
                    # Whoever leaves is left alone: half of it would be a death. It takes seconds at most.
                    limit.reschedule(None)
                    await finish(self._cluster.leave(slots))
                    gone &= self._cluster.mailbox.gone
        except (TimeoutError, CannotDrain) as error:
            state = "they are not empty" if self._mover else "the run is still starting, and its slots have no roles,"
            raise self._not_emptied(slots, str(error) or f"{state} after {limit_s:.3g} s") from error
        if dead := [slot for slot in slots if slot not in self._cluster.mailbox.gone]:
            raise self._not_emptied(slots, self._cluster.mailbox.lost.get(dead[0], f"slot {dead[0]} has not left"))
        for slot in slots:
            did = f", after {emptied_s:.2f} s in which it gave up what it did" if held[slot] else ""
            said = f"Slot {slot} is gone{did}: nothing was lost."
            self._record.event(SlotGone(slot, held[slot], round(emptied_s, 3), sentence=said))
        return Drained(slots, emptied_s, f"{who} {verb} gone, emptied within {emptied_s:.2f} s: nothing was lost.")

    def _not_emptied(self, slots: Sequence[int], why: str) -> CannotDrain:
        trains = not {*slots}.isdisjoint(self._trainer.layout.slots)
        then = " The last whole step is saved." if trains else ""
        error = CannotDrain(f"{slots_of(slots)} cannot be emptied: {why}")
        self._record.event(SlotNotEmptied(tuple(slots), sentence=f"{capitalised(str(error))}.{then}"))
        if trains:
            self.save_soon.set()
        return error

    def _require_mover(self) -> Mover:
        if self._mover is None:
            raise CannotDrain("the run is starting: its slots have no roles yet")
        return self._mover
