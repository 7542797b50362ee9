"""Train slots in memory that know the rules of a resize: the double of `ductile.trainer.train_role` behind its
messages.

A slot's gradient is the list of samples it has trained since the last optimizer step, so that a sample which is lost,
or trained twice, shows. Commands that come at the wrong moment fail the test, not the slot.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from ductile.core.layout.geometry.parallel_layout import ParallelLayout, ResizeOrder
from ductile.messages.resizes import (
    Commit,
    Finalize,
    Freeze,
    Frozen,
    Prepare,
    Rollback,
    SlotPhase,
    StateTransferred,
    TransferState,
)
from ductile.messages.workers import (
    AssignRole,
    Command,
    Done,
    Event,
    Failed,
    ForwardBackward,
    ForwardBackwardDone,
    OptimStep,
    Park,
    PreparationEnded,
    Publish,
    Published,
    ReleaseRole,
    Reply,
    StateMoved,
    Stepped,
    Unpark,
    Withdraw,
)
from ductile.records import Manifest, Sample, StepReport, TrainProgress
from tests.orchestrator.doubles import run


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """In virtual time, until nobody replies any more."""

    async def whole() -> None:
        await story()
        await asyncio.sleep(1000)

    run(whole())


def sample(number: int, num_tokens: int) -> Sample:
    """Its first token is its number."""
    return Sample((number, *range(1, num_tokens)), (False,) + (True,) * (num_tokens - 1))


@dataclass
class State:
    layout: ParallelLayout
    step: int = 0
    gradient: list[int] = field(default_factory=list)


@dataclass
class Slot:
    number: int
    live: State | None = None
    """What it trains with."""
    new: State | None = None
    """Between `TransferState` and `Commit`."""
    old: State | None = None
    """Between `Commit` and `Finalize`."""
    holds: bool = False
    change: ResizeOrder | None = None
    parked: bool = False
    prepared: bool = False
    frozen: bool = False
    committed: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class TrainSlots:
    """`MemoryTransport({slot: slots.respond for slot in ...})`"""

    def __init__(self, layout: ParallelLayout, num_slots: int) -> None:
        self.slots = {number: Slot(number) for number in range(num_slots)}
        for number in layout.slots:
            self.slots[number].live, self.slots[number].holds = State(layout), True
        self.wrong: list[str] = []
        """What should not have been asked."""
        self.spoil: dict[int, str] = {}
        """Slot to what it gets wrong: "plan", "bytes", "step"."""
        self.phases: dict[SlotPhase, float] = {"transfer": 0.01}
        """What each slot says of its work for a change, and which of it was beside training."""
        self.beside: tuple[SlotPhase, ...] = ()
        self.prepare_s: dict[int, float] = {}
        """Slot to how many seconds it takes to prepare; none unless it is named here."""
        self.cannot: dict[int, str] = {}
        """Slot to why it cannot prepare."""
        self.cannot_park: set[int] = set()
        self.tell: Callable[[int, Event], None] = lambda number, event: None
        """Told what slots say unasked: `MemoryTransport.emit`."""
        self.asked: list[tuple[int, Command]] = []
        """As they were executed."""
        self.work_s: Callable[[int, Command], float] = lambda number, command: 0.01
        self._steps: dict[int, list[int]] = {}

    @property
    def trained(self) -> list[list[int]]:
        """Samples of each optimizer step, sorted."""
        return [sorted(numbers) for _, numbers in sorted(self._steps.items())]

    async def respond(self, number: int, command: Command) -> Reply:
        slot = self.slots[number]
        async with nullcontext() if command.is_beside else slot.turn:  # a slot executes its other commands in order
            await asyncio.sleep(self.work_s(number, command))
            self.asked.append((number, command))
            try:
                return self._respond(slot, command)
            except AssertionError as error:
                self.wrong.append(f"slot {number}: {type(command).__name__}: {error}")
                return Failed(str(error))

    def _respond(self, slot: Slot, command: Command) -> Reply:
        assert not slot.parked or isinstance(command, Park | Unpark | Withdraw), "its state is parked"
        match command:
            case Park():
                assert slot.live is not None, "it has no state"
                assert slot.change is None, "its state is about to move"
                if slot.number in self.cannot_park:
                    return Failed("there is no host memory for it")
                slot.parked = True
                return StateMoved(1000, 0, self.work_s(slot.number, command))
            case Unpark():
                was, slot.parked = slot.parked, False
                return StateMoved(1000 if was else 0, 0, self.work_s(slot.number, command))
            case ForwardBackward(micro_batches=micro_batches):
                assert slot.live is not None, "has no state"
                assert not slot.frozen, "is frozen"
                slot.live.gradient += [sample.token_ids[0] for each in micro_batches for sample in each.samples]
                return ForwardBackwardDone(command.count_tokens(), self.work_s(slot.number, command))
            case OptimStep():
                return self._optim_step(slot)
            case Publish(with_frozen=with_frozen):
                first = slot.live is not None and slot.number == slot.live.layout.slots[0]
                manifest = Manifest(0, "shared_memory", f"slot {slot.number}", 0, 0, (), is_whole=with_frozen)
                return Published(manifest if first else None)
            case AssignRole(joining=True):
                assert not slot.holds, "holds the role already"
                slot.holds = True
            case Prepare(change):
                assert slot.holds, "does not hold the role"
                assert slot.change is None or slot.committed, "is in another change"
                slot.old, slot.committed = None, False
                assert (slot.live is None) == (slot.number not in change.before.slots)
                slot.change, slot.prepared = change, False
                asyncio.get_running_loop().call_later(
                    self.prepare_s.get(slot.number, 0.0), self._ends_preparing, slot, change
                )
            case Freeze(epoch):
                assert slot.prepared, "is not prepared"
                self._expect(slot, epoch)
                slot.frozen = True
                return Frozen(b"other" if self.spoil.get(slot.number) == "plan" else b"plan", self._progress(slot))
            case TransferState(epoch, progress):
                return self._move(slot, epoch, progress)
            case Commit(epoch):
                self._expect(slot, epoch)
                slot.old, slot.live, slot.new = slot.live, slot.new, None
                slot.frozen, slot.committed = False, True
            case Rollback(epoch):
                # As a real slot: one that has not heard of this change has nothing to take back.
                if slot.change is not None and slot.change.epoch == epoch:
                    slot.live = slot.old if slot.committed else slot.live
                    slot.old = slot.new = slot.change = None
                    slot.frozen = slot.committed = False
            case Finalize(epoch):
                if slot.number not in self._expect(slot, epoch).after.slots:
                    slot.live = None  # also when it refused `Commit`, when all others had voted
                slot.old = slot.change = None
                slot.committed = False
            case ReleaseRole():
                if not slot.holds:
                    return Failed("does not hold the role")
                assert slot.live is None, "trains"
                slot.holds, slot.committed = False, False
                slot.change = slot.old = None
            case Withdraw():
                assert slot.holds, "does not hold the role"
        return Done()

    def _ends_preparing(self, slot: Slot, change: ResizeOrder) -> None:
        if slot.change is change:
            slot.prepared = slot.number not in self.cannot
            why = self.cannot.get(slot.number)
            self.tell(slot.number, PreparationEnded(change.epoch, Failed(why) if why else None))

    def _expect(self, slot: Slot, epoch: int) -> ResizeOrder:
        assert slot.change is not None, "knows of no change"
        assert slot.change.epoch == epoch
        return slot.change

    def _progress(self, slot: Slot) -> TrainProgress | None:
        if slot.live is None:
            return None
        step = slot.live.step + (self.spoil.get(slot.number) == "step")
        return TrainProgress(step, step, True, {"loss": float(len(slot.live.gradient))})

    def _move(self, slot: Slot, epoch: int, progress: TrainProgress) -> Reply:
        assert slot.frozen, "is not frozen"
        change = self._expect(slot, epoch)
        olds = [self.slots[number].live for number in change.before.slots]
        assert all(old is not None for old in olds)
        gradient = [number for old in olds if old for number in old.gradient]
        assert progress.sums["loss"] == len(gradient), "the sums are not those of all slots"
        if slot.number in change.after.slots:
            mine = gradient if slot.number == change.after.slots[0] else []
            slot.new = State(change.after, progress.step, list(mine))
        told = {peer: peer + slot.number for peer in change.slots if peer != slot.number}
        sent = {peer: print_ + (self.spoil.get(slot.number) == "bytes") for peer, print_ in told.items()}
        return StateTransferred(sent, told, 1000, self.phases, "memory, as there is nothing else", self.beside)

    def _optim_step(self, slot: Slot) -> Reply:
        assert slot.live is not None, "has no state"
        assert not slot.frozen, "is frozen"
        slot.live.step += 1
        taken = self._steps.setdefault(slot.live.step, [])
        taken += slot.live.gradient
        slot.live.gradient = []
        return Stepped(StepReport(slot.live.step, 0.0, 0.0, 0.0, 1))
