"""Train roles that wait at a point of a test's choice, so that a signal comes exactly there.

    arm(folder, slot, "TransferState", "before")       the slot will stop there, once, for as long as it lives
    reached(folder, slot, "TransferState", "before")   it has

"before" is when the command has arrived, "after" is when it is done and has no reply yet. The folder is in the
environment (`POINTS`), which slots inherit. To have a stopped slot found soon, they send heartbeats more often.
"""

import os
import time
from pathlib import Path
from typing import Any

from ductile.core.layout.geometry.parallel_layout import ResizeOrder
from ductile.messages.resizes import Commit, Freeze, Frozen, Prepare, Rollback, StateTransferred, TransferState
from ductile.messages.workers import Done, ForwardBackward, ForwardBackwardDone, OptimStep, PreparationEnded, Stepped
from ductile.records import StepReport, TrainProgress
from ductile.roles import RoleAssignment
from ductile.slot import link
from ductile.trainer.train_role import TrainRole

link.HEARTBEAT_INTERVAL_S = 0.1

POINTS = "DUCTILE_TEST_POINTS"
STAYS_S = 60.0

HELD_ECHO = {"train": "tests.slot.held:HeldEcho"}
HELD_TRAINER = {"train": "tests.slot.held:HeldTrainer"}


def arm(folder: Path, slot: int, command: str, moment: str) -> None:
    (folder / f"{slot}.{command}.{moment}").touch()


def reached(folder: Path, slot: int, command: str, moment: str) -> bool:
    return (folder / f"{slot}.{command}.{moment}.reached").exists()


def _wait_if_armed(slot: int, command: str, moment: str) -> None:
    point = Path(os.environ[POINTS], f"{slot}.{command}.{moment}")
    if point.exists():
        point.rename(f"{point}.reached")
        time.sleep(STAYS_S)


class TrainEcho:
    """Replies as a train slot would, and has no state but a step."""

    def __init__(self, settings: dict[str, Any], place: RoleAssignment) -> None:
        self._has_state, self._step, self._change = not place.joining, 0, ResizeOrder
        self._slot, self._tell = place.slot, place.tell

    def handle(self, command: Any) -> Any:
        match command:
            case ForwardBackward() if self._has_state:
                time.sleep(0.002)
                return ForwardBackwardDone(1, 0.002)
            case OptimStep() if self._has_state:
                self._step += 1
                return Stepped(StepReport(self._step, 0.0, 0.0, 0.0, 1))
            case Prepare(change):
                self._change, self._had_state = change, self._has_state
                self._tell(PreparationEnded(change.epoch))
            case Freeze(with_gradient=with_gradient):
                progress = TrainProgress(self._step, self._step, with_gradient) if self._has_state else None
                return Frozen(b"plan", progress)
            case TransferState(progress=progress):
                self._new_step = progress.step
                return StateTransferred({}, {}, 8, {"transfer": 0.0}, "nothing moved")
            case Commit():
                self._has_state, self._step = self._slot in self._change.after.slots, self._new_step
            case Rollback():
                self._has_state = self._had_state
            case ForwardBackward() | OptimStep():
                raise RuntimeError("this slot has no state")
        return Done()

    def has_work(self) -> bool:
        return False

    def step(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class HeldEcho(TrainEcho):
    def __init__(self, settings: dict[str, Any], place: RoleAssignment) -> None:
        _wait_if_armed(place.slot, "AssignRole", "before")
        super().__init__(settings, place)
        _wait_if_armed(place.slot, "AssignRole", "after")

    def handle(self, command: Any) -> Any:
        _wait_if_armed(self._slot, type(command).__name__, "before")
        reply = super().handle(command)
        _wait_if_armed(self._slot, type(command).__name__, "after")
        return reply


class HeldTrainer(TrainRole):
    def __init__(self, settings: dict[str, Any], place: RoleAssignment) -> None:
        self._number = place.slot
        super().__init__(settings, place)

    def handle(self, command: Any) -> Any:
        _wait_if_armed(self._number, type(command).__name__, "before")
        reply = super().handle(command)
        _wait_if_armed(self._number, type(command).__name__, "after")
        return reply
