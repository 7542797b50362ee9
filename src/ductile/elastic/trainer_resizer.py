"""Who trains: what may be changed about it, one resize at a time, and what became of the resizes so far."""

import asyncio
import time
import traceback
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from ductile.cluster.cluster import Cluster, StartFailed
from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.listeners import Listeners
from ductile.core.instances.placement import slots_of
from ductile.core.layout.choice.layout_rules import NO_RULES, LayoutRules
from ductile.core.layout.choice.requested_layout import LayoutRequest, RequestError, requested_layout
from ductile.core.layout.geometry.node_order import inside_first
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.orders import Release
from ductile.core.scheduling.resize_rulings import describe
from ductile.core.transfer.order import stays_put
from ductile.elastic.transaction import ResizeOptions, Transaction
from ductile.error_text import error_text
from ductile.events.resizes import ResizeRolledBack, TrainerResized
from ductile.events.slots import SlotStarted
from ductile.fleet.run_roles import RunRoles
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.control import Resized
from ductile.observe import Recorder
from ductile.roles import TrainerLost


class CannotResize(Exception):
    """What was asked for cannot be, and nothing was tried. The text is a sentence."""


class ResizeNotDone(Exception):
    """Another resize is under way, or the trainer is lost, or the resize failed in an unexpected way. The text is a
    sentence."""


class TrainerResizer:
    """Resizes the trainer. Slots that are missing are started for it; those that leave stay, without the role."""

    def __init__(
        self,
        cluster: Cluster,
        trainer: RemoteTrainer,
        options: ResizeOptions,
        record: Recorder,
        num_slots: int,
        fleet: RunRoles | None = None,
        rules: LayoutRules = NO_RULES,
    ) -> None:
        """num_slots: how many slots the run may have. fleet: has the trainer; None where there is nothing else."""
        self.rules = rules
        """Which layout the trainer has on how many slots: the run's only rules, which resizes by hand add to."""
        self.num_resized = 0
        self.on_end = Listeners[[]]()
        """Told when a resize has ended, whatever became of it."""
        self._cluster, self._trainer, self._options, self._record = cluster, trainer, options, record
        self._num_slots, self._fleet = num_slots, fleet
        self._target: ParallelLayout | None = None
        """Layout that the change under way leads to; None when no change is under way."""
        self._involved: frozenset[int] = frozenset()
        """Slots of the layouts before and after it."""
        self._transaction: Transaction | None = None
        self._paused_s = 0.0
        self._ended = ChangeSignal()
        cluster.ends_without(self.depends_on)

    @property
    def layout(self) -> ParallelLayout:
        """Layout of the trainer."""
        return self._trainer.layout

    async def resize(self, after: ParallelLayout, release: Release | None = None) -> Resized:
        """Have the trainer go on in this layout, with its order of slots, and wait for what comes of it.

        release: what is released once all is prepared and the trainer stands still, such as joiners' other roles.

        Raises CannotResize for slots that do not exist or do not start, and ResizeNotDone when another change is under
        way, when the trainer is lost, or when the change fails in an unexpected way.
        """
        self._refuse_unknown(after.slots)
        before = self._trainer.layout
        if self._target is not None:
            raise ResizeNotDone(f"the trainer is on its way to {describe(self._target)}: one resize at a time")
        if before == after:
            sentence = f"Trainer is on {describe(before)} already."
            return Resized("unchanged", sentence, self._cluster.mailbox.epoch, before, after)
        if self._trainer.parking.is_parked:
            raise ResizeNotDone("the trainer's state is parked, as its slots lend their devices")
        self._target, began_s = after, time.monotonic()
        self._involved = frozenset({*before.slots, *after.slots})
        try:
            await self._start(after.slots)
            mailbox, kill = self._cluster.mailbox, self._cluster.condemn
            self._transaction = Transaction(
                mailbox, self._trainer, after, self._options, kill, release=release, fleet=self._fleet
            )
            resized = await self._transaction.run()
        except TrainerLost as error:
            self._cluster.fail(str(error))
            raise ResizeNotDone(str(error)) from error
        except (CannotResize, ResizeNotDone):
            raise
        except Exception as error:
            raise ResizeNotDone(self._note_failure(before, after, error)) from error
        except asyncio.CancelledError:
            if self._transaction is not None and self._trainer.layout == after:
                self._note(self._transaction.resized(), time.monotonic() - began_s)
            raise
        finally:
            self._target = self._transaction = None
            self._involved = frozenset()
            self._ended.notify_all()
            self.on_end()
        return self._note(resized, time.monotonic() - began_s)

    async def resize_to(self, after: ParallelLayout, release: Release | None = None) -> Resized:
        """`resize`, in the order of slots that moves least of the state, if that keeps as many groups inside nodes as
        the order of `after` does."""
        self._refuse_unknown(after.slots)
        before = self._trainer.layout
        same = {*before.slots} == {*after.slots} and before.dims == after.dims and before.stages == after.stages
        moved = before if same else inside_first(stays_put(before, after), after, self.rules.topology)
        return await self.resize(moved, release)

    async def resize_as(self, request: LayoutRequest) -> Resized:
        """`resize_to` the layout that somebody asks for. Sizes that are asked for are those that the trainer has from
        then on, wherever they fit; they come before listed layouts."""
        layout = self.layout_of(request)
        asked = request.asked(self._trainer.layout, self.rules)
        resized = await self.resize_to(layout)
        if asked is not None and resized.outcome != "rolled_back":
            self.rules = self.rules.asked_by_hand(asked.like(layout.dims), len(layout.slots))
        return resized

    def layout_of(self, request: LayoutRequest) -> ParallelLayout:
        """The layout that is asked for. Raises CannotResize for one that cannot be."""
        cluster, now = self._cluster, self._trainer.layout
        busy = [slot for slot in cluster.slots if cluster.mailbox.roles(slot) or slot in cluster.mailbox.lost]
        try:
            return requested_layout(request, now, self.rules, range(self._num_slots), busy)
        except RequestError as error:
            raise CannotResize(str(error)) from error

    @property
    def under_way(self) -> str:
        """ "transfer, to slots 0-3"; "" when no change is."""
        if self._target is None:
            return ""
        phase = self._transaction.phase if self._transaction else "start"
        return f"{phase}, to {describe(self._target)}"

    def depends_on(self, slot: int) -> bool:
        """True when the run cannot go on without this slot.

        It says no of slots that train while a resize judges what their deaths mean, as the resize ends the run if it
        must. `RemoteTrainer.needs` says yes of these, too.
        """
        return slot in self._trainer.publishers or (self._trainer.needs(slot) and not self.judges(slot))

    async def change_over(self, slot: int) -> None:
        """Returns when no resize is under way that the slot has a part in."""
        while self.involves(slot):
            await self._ended.wait()

    def involves(self, slot: int) -> bool:
        """True when a resize is under way that the slot has a part in."""
        return slot in self._involved

    def judges(self, slot: int) -> bool:
        """True when a resize under way rules on what the slot's death means for the run."""
        return self._transaction is not None and self._transaction.judges(slot)

    def metrics(self) -> dict[str, float]:
        """Metrics for the row of a step; `seconds/resize` counts from the row before."""
        paused_s, self._paused_s = self._paused_s, 0.0
        return {
            "train_slots": float(len(self._trainer.layout.slots)),
            "resizes": float(self.num_resized),
            "seconds/resize": paused_s,
        }

    def _refuse_unknown(self, slots: Collection[int]) -> None:
        beyond = [slot for slot in slots if not 0 <= slot < self._num_slots]
        if beyond:
            verb = "does" if len(beyond) == 1 else "do"
            raise CannotResize(
                f"{slots_of(beyond)} {verb} not exist: the run may have slots 0 to {self._num_slots - 1}, as "
                "deployment.gpus_per_node says; use these, or start the run with another number there"
            )

    async def _start(self, slots: Sequence[int]) -> None:
        try:
            started = await self._cluster.add(slots)
        except StartFailed as error:
            raise CannotResize(str(error)) from error
        for slot in started:
            device, pid = self._cluster.devices[slot], self._cluster.processes[slot].pid
            sentence = f"Slot {slot} runs on {device}, pid {pid}: it will join the trainer."
            self._record.event(SlotStarted(slot, (), device, pid, self._cluster.node_of(slot), sentence=sentence))

    def _note_failure(self, before: ParallelLayout, after: ParallelLayout, error: Exception) -> str:
        """Write the failure down. Returns its sentence without the full stop."""
        now = self._trainer.layout
        self.num_resized += now != before
        sentence = f"Trainer is on {describe(now)}; its resize to {describe(after)} failed: {error_text(error)}"
        text = "".join(traceback.format_exception(error))
        self._event(now != before, f"{sentence}.", self._cluster.mailbox.epoch, before, after, traceback=text)
        return sentence

    def _note(self, resized: Resized, took_s: float) -> Resized:
        resized = msgspec.structs.replace(resized, took_s=took_s)
        is_resized = resized.outcome == "resized"
        self.num_resized += is_resized
        self._paused_s += resized.pause_s
        self._event(
            is_resized,
            resized.sentence,
            resized.epoch,
            resized.before,
            resized.after,
            pause_s=resized.pause_s,
            took_s=resized.took_s,
            seconds=resized.seconds,
            slot_seconds=resized.slot_seconds,
            beside=resized.beside,
            num_bytes=resized.num_bytes,
            carrier=resized.carrier,
        )
        return resized

    def _event(
        self, is_resized: bool, sentence: str, epoch: int, before: ParallelLayout, after: ParallelLayout, **more: Any
    ) -> None:
        ended = (TrainerResized if is_resized else ResizeRolledBack)(
            epoch=epoch,
            before=before.slots,
            before_dims=before.dims,
            after=after.slots,
            after_dims=after.dims,
            step=self._record.last_step or 0,
            sentence=sentence,
            **more,
        )
        self._record.event(ended)
