"""One change of the trainer's layout, as one slot goes through it (docs/resize.md).

    Prepare         `ductile.trainer.prepare`                                                 beside training
    Freeze          say which plan this slot made, and how far it is                          ┐
    TransferState   make groups, where that may not be done beside training; fill the new     │
                    trainer's memory; what is no tensor comes in `TrainProgress`              ├ nothing trains
    Commit          the new trainer is the trainer                                            ┘
    Finalize        destroy the old one                            or Rollback: destroy the new one

Nothing here touches what the old trainer needs: its groups, its tensors and its connection to the store are its own. So
whatever fails, and whichever slot dies, it can go on as long as its own slots live. A step that needs others gives up
after `trainer.resize.timeout_s`; the exception is a slot that dies, or is stuck, while NCCL connects.
"""

import gc
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ductile.config.schema.trainer import TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ResizeOrder
from ductile.core.transfer.plan import Plan
from ductile.fabric import heap, transfer
from ductile.fabric.memory import Memory
from ductile.messages.resizes import Frozen, SlotPhase, StateTransferred
from ductile.observe import timed
from ductile.records import TrainProgress
from ductile.roles import RoleAssignment
from ductile.trainer.prepare import Connected, Preparation, ResizeFailed, TrainerPart, fingerprints
from ductile.trainer.state import GRADIENT, StatePlans, device_of, named_gradient, parts_of, set_gradient
from ductile.trainer.trainer import Trainer


class Resize:
    """The slot's main thread takes the five steps in their order, or `rollback` after any of them but `finalize`."""

    def __init__(
        self,
        order: ResizeOrder,
        assignment: RoleAssignment,
        config: TrainerConfig,
        plans: StatePlans,
        before: TrainerPart | None,
    ) -> None:
        """`before` is what the slot has now: None on a joining slot."""
        self.order = order
        self._slot, self._device = assignment.slot, assignment.device
        self._config = config
        self._before = before
        self._preparation = Preparation(order, replace(assignment, epoch=order.epoch), config, plans, before)
        self._plan: Plan | None = None
        self._is_moved = False
        self.is_committed = False

    def prepare(self) -> None:
        """Begin, beside what the main thread does, which may be another role's work."""
        self._preparation.start()

    def freeze(self, with_gradient: bool) -> Frozen:
        planned = self._preparation.result()
        if torch.device(self._device).type == "cuda":
            # A slot that only gives its part in a gather, for a publish or a checkpoint, is done when that is queued.
            # Once all slots are frozen, no collective runs.
            torch.cuda.synchronize(self._device)
        progress = None
        if self._before is not None:
            if self._before.trainer is None:
                raise ResizeFailed("this slot lost its part of the trainer's state in an earlier failure")
            progress = self._before.trainer.progress()
            if progress.with_gradient != with_gradient:
                has = "has" if progress.with_gradient else "has not"
                raise ResizeFailed(f"this slot {has} accumulated a gradient, contrary to what it was told")
        self._plan = planned.plans[with_gradient]
        return Frozen(self._plan.key, progress)

    def transfer_state(self, progress: TrainProgress) -> StateTransferred:
        """Fill the new trainer. Raises `TransferFailed` when bytes do not arrive, and after that the old one is whole,
        unless the state was streamed."""
        planned, plan = self._preparation.result(), self._plan
        if plan is None:
            raise ResizeFailed("nothing can move before everybody is frozen")
        seconds, carrier = planned.seconds, planned.reason
        try:
            if self._config.resize.memory == "streaming":
                moved = self._stream(self._preparation.connected(), plan, progress, seconds)
                carrier += "; the old state is gone"
            else:
                moved = self._shadow(self._preparation.connected(), plan, progress, seconds)
        except Exception as error:
            # A slot may wait for this one's messages, and not for those of the slot that failed first.
            self._preparation.abandon(error)
            raise
        self._is_moved = True
        return StateTransferred(moved.sent, moved.received, moved.num_bytes, seconds, carrier, planned.beside)

    def _shadow(
        self, connected: Connected, plan: Plan, progress: TrainProgress, seconds: dict[SlotPhase, float]
    ) -> transfer.Moved:
        """Old and new state exist side by side."""
        verify = self._config.resize.verify
        with timed(seconds, "bind"):
            old = connected.old | self._old_gradient() if progress.with_gradient else connected.old
            moving = connected.transfers[progress.with_gradient]
            moving.bind(old)
        with timed(seconds, "transfer"):
            moved = moving.run()
        if verify == "all":
            with timed(seconds, "verify"):
                _check_kept(plan, self._slot, old, moving.buffers)
        with timed(seconds, "rebuild"):
            _set_progress(connected.after, progress, moving.buffers)
        return moved

    def _stream(
        self, connected: Connected, plan: Plan, progress: TrainProgress, seconds: dict[SlotPhase, float]
    ) -> transfer.Moved:
        """Old memory is freed while new memory fills."""
        device = self._device

        def room(name: str, dtype: str, size: int) -> Tensor:
            where = device_of(self._config.model, name, device)
            return torch.zeros(size, dtype=getattr(torch, dtype), device=where, pin_memory=where == "cpu" != device)

        with timed(seconds, "transfer"):
            state: dict[str, Tensor] = {}
            if self._before is not None and self._before.trainer is not None:
                state |= self._before.state
                state |= self._old_gradient() if progress.with_gradient else {}
                self._before.drop()
                gc.collect()  # its modules refer to each other in circles, and to the state
            buffers, moved = transfer.stream(
                plan,
                self._slot,
                state,
                connected.carrier,
                room,
                fingerprints(self._config),
            )
        with timed(seconds, "rebuild"):
            if connected.after is not None and connected.context is not None:
                gradient = {name: buffers.pop(name) for name in list(buffers) if name.startswith(GRADIENT)}
                connected.after.attach(Trainer(self._config, connected.context, device, buffers))
                _set_progress(connected.after, progress, gradient)
        return moved

    def commit(self) -> TrainerPart | None:
        """Return what the slot has from now on."""
        if not self._is_moved:
            raise ResizeFailed("this slot has not moved its part of the state")
        after = self._preparation.connected().after
        if after is not None:
            after.groups.set_timeout(self._config.dist_timeout_seconds)
        self.is_committed = True
        return after

    def rollback(self) -> TrainerPart | None:
        """Return what the slot has again: its trainer, unless the state was streamed away."""
        self._plan = None
        self._is_moved = False
        self._preparation.discard()
        heap.trim_all()
        return self._before

    def finalize(self) -> TrainerPart | None:
        """Return what the slot has from now on, also if it was never told to commit: all had voted."""
        after = self._preparation.finish()
        if self._before is not None:
            # Its groups have had no collective since all were frozen, and a slot that leaves may have died since.
            self._before.abort_idle()
        self._before = None
        heap.trim_all()
        return after

    def _old_gradient(self) -> dict[str, Tensor]:
        if self._before is None or self._before.trainer is None:
            return {}
        return parts_of(named_gradient(self._before.trainer))


def _set_progress(after: TrainerPart | None, progress: TrainProgress, buffers: Mapping[str, Tensor]) -> None:
    """All that the new trainer needs besides parameters and moments."""
    if after is not None and after.trainer is not None:
        after.trainer.go_on_from(progress)
        if progress.with_gradient:
            set_gradient(after.trainer, buffers)


def _check_kept(plan: Plan, slot: int, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """What stayed on this slot is, bit for bit, where it belongs now."""
    before, after = Memory(plan.source, slot, old), Memory(plan.target, slot, new)
    for part in plan.local(slot):
        if not torch.equal(before.box(part.name, part.box), after.box(part.name, part.box)):
            raise ResizeFailed(f"{part.name} is not what it was, in rows {part.box[0][0]} to {part.box[1][0]}")
