"""Eight processes, started once, on which one trainer after the other is built; and what theirs is compared with.

A mesh is laid on some of them, and its groups are gone before the next one comes. What a failure leaves is not gone on
with: all eight are killed, and others are started.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from ductile.core.layout.model.spec import ModelSpec
from ductile.model.checkpoint import read_spec
from tests.parity.batches import BATCHES, TrainingBatch
from tests.parity.measured import Measured, measure, measure_textbook
from tests.parity.meshes import NUM_SLOTS, MeshCase, mesh
from tests.parity.model import COLLECTIVE_TIMEOUT_S, Memory, make_folders, settings_for
from tests.trainer.fleet import Fleet

ONE_SLOT = mesh()
DEADLINE_S = COLLECTIVE_TIMEOUT_S + 20.0
"""Most that a slot may take to answer: a collective that hangs is an error of the slot's own before that."""


class Harness:
    def __init__(self, folder: Path) -> None:
        """Models and checkpoints are written to the folder."""
        self.folder = folder
        self._models = make_folders(folder)
        self._fleet: Fleet | None = None
        self._textbook: dict[str, Measured] = {}
        self._measured: dict[tuple[MeshCase, str, int], Measured] = {}
        self._num_folders = 0

    def __enter__(self) -> "Harness":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._fleet is not None:
            self._fleet.__exit__(kind, error, at)
            self._fleet = None

    def spec(self, model: str) -> ModelSpec:
        return read_spec(self._models[model])

    def new_folder(self) -> Path:
        """For what a check writes."""
        self._num_folders += 1
        folder = self.folder / f"check_{self._num_folders}"
        folder.mkdir()
        return folder

    @contextmanager
    def trainer(
        self, case: MeshCase, model: str, resized_to: MeshCase | None = None, memory: Memory = "shadow"
    ) -> Iterator[Fleet]:
        """A fresh trainer on the mesh's slots, which the block may resize to another mesh."""
        fleet = self._fleet = self._fleet or Fleet({}, range(NUM_SLOTS), deadline_s=DEADLINE_S)
        try:
            settings = dict(case.settings) | dict(resized_to.settings if resized_to else ())
            fleet.settings = settings_for(self._models[model], settings, memory)
            fleet.assign_in(case.layout)
            yield fleet
            fleet.release(fleet.layout.slots)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def one_slot(self, model: str) -> Measured:
        """What a trainer on one slot computes."""
        return self.measured(ONE_SLOT, model, BATCHES)

    def measured(self, case: MeshCase, model: str, batches: Sequence[TrainingBatch]) -> Measured:
        """Return what a trainer on this mesh computes of the batches."""
        key = case, model, len(batches)
        if key not in self._measured:
            with self.trainer(case, model) as fleet:
                self._measured[key] = measure(fleet, self.spec(model), batches)
        return self._measured[key]

    def textbook(self, model: str) -> Measured:
        """What is computed without any of the trainer's code."""
        if model not in self._textbook:
            with self.trainer(ONE_SLOT, model) as fleet:  # for its process: torch's default group is none of this one's
                arguments = (self._models[model], BATCHES, fleet.settings)
                (self._textbook[model],) = fleet.call(fleet.layout.slots, measure_textbook, *arguments).values()
        return self._textbook[model]
