"""What is shown of a mesh, or of two, each as a row of a table.

    mesh          three optimizer steps on it give what they give on one device, and every slot publishes what came of
                  them, bit for bit
    resize        a trainer goes from one mesh to another in the middle of a batch: no bit of its state changes, and its
                  losses are those of a trainer that was never resized; with shadow memory or streaming
    knob          five optimizer steps on a mesh with knobs of memory give what they give on one device without any; and
                  where these only recompute or move numbers, every bit of what they give on the mesh without them
    checkpoint    what is saved on one mesh is on another, bit for bit, what it was, and so is what is exported

How far they may be apart: `tests.parity.measured` and this page.
"""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from ductile.messages.workers import ExportModel, LoadState, SaveState
from ductile.model.checkpoint import read_tensors
from ductile.records import StepReport
from tests.parity.assemble import Array, differing
from tests.parity.batches import BATCHES, FIVE_BATCHES
from tests.parity.harness import ONE_SLOT, Harness
from tests.parity.knobs import ROUNDS_OTHERWISE, knobs_of, without_knobs
from tests.parity.measured import (
    BOUNDS,
    GRADIENT,
    PARAMETERS,
    STATE,
    Measured,
    differences,
    largest,
    measure,
    published,
    run_chunk,
    train_on,
    whole_state,
)
from tests.parity.meshes import MeshCase
from tests.parity.model import Memory
from tests.parity.rows import Row, judged

Kind = Literal["mesh", "resize", "streaming resize", "checkpoint", "knob"]
Values = Mapping[str, float]

MESH_BOUNDS = {**BOUNDS, "published": 0.0}
"""`published`: in how many tensors what a slot publishes is something else than what the slots have."""
EXACT_BOUNDS = {"changed": 0.0, "loss": 1e-5, "grad_norm": 1e-4}
"""For a state that goes from mesh to mesh: how many of its tensors may change, and how far a trainer that goes on with
it may be from one that was on one slot all the time."""
KNOB_BOUNDS = {**BOUNDS, "parameters": 1e-4, "changed": 0.0}
"""`parameters`: how far any of them may be from one device's; `changed`: how many of them, and losses, are not what the
mesh without the knobs gives."""
CHECKPOINT_BOUNDS = {**EXACT_BOUNDS, "exported": 0.0}
"""`exported`: how many tensors of the folder are something else than what was saved."""


@dataclass(frozen=True)
class Check:
    kind: Kind
    cases: tuple[MeshCase, ...]
    """The mesh; or the one before and the one after."""
    model: str

    def __str__(self) -> str:
        memory = " (streaming)" if self.kind == "streaming resize" else ""
        return " -> ".join(case.name for case in self.cases) + memory

    def run(self, harness: Harness) -> Row:
        find, bounds = _KINDS[self.kind]
        began_s = time.monotonic()
        try:
            values = find(harness, *self.cases, self.model)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            return Row(str(self), self.model, "FAIL", {}, said, time.monotonic() - began_s, traceback.format_exc())
        return judged(str(self), self.model, values, bounds, time.monotonic() - began_s)


def _on_mesh(harness: Harness, case: MeshCase, model: str) -> Values:
    """One slot is compared with the textbook, everything else with one slot."""
    reference = harness.textbook(model) if case == ONE_SLOT else harness.one_slot(model)
    with harness.trainer(case, model) as fleet:
        measured = measure(fleet, harness.spec(model), BATCHES)
        wrong = {name for parameters in published(fleet) for name in differing(measured.after, parameters)}
    return differences(measured, reference) | {"published": len(wrong)}


def _with_knobs(harness: Harness, case: MeshCase, model: str) -> Values:
    reference = harness.measured(ONE_SLOT, model, FIVE_BATCHES)
    measured = harness.measured(case, model, FIVE_BATCHES)
    apart = largest([largest(measured.after[name] - after) for name, after in reference.after.items()])
    changed = 0
    if ROUNDS_OTHERWISE.isdisjoint(knobs_of(case)):
        plain = harness.measured(without_knobs(case), model, FIVE_BATCHES)
        changed = len(differing(measured.after, plain.after)) + (measured.losses != plain.losses)
    return differences(measured, reference) | {"parameters": apart, "changed": changed}


def _after_resize(harness: Harness, first: MeshCase, second: MeshCase, model: str, memory: Memory = "shadow") -> Values:
    reference = harness.one_slot(model)
    spec, kinds = harness.spec(model), (*STATE, *GRADIENT)
    begun, interrupted, last = BATCHES
    with harness.trainer(first, model, second, memory) as fleet:
        reports = [train_on(fleet, begun)]
        run_chunk(fleet, interrupted.chunks[0])
        before: dict[str, Array] = {}
        moved = fleet.resize(second.layout, when_frozen=lambda: before.update(whole_state(fleet, spec, kinds)))
        after = whole_state(fleet, spec, kinds)
        for chunk in interrupted.chunks[1:]:
            run_chunk(fleet, chunk)
        reports.append(fleet.optim_step(interrupted.loss_denominator))
        reports.append(train_on(fleet, last))
    moved_kib = sum(slot.num_bytes for slot in moved.values()) // 1024
    return _changed(before, after) | {"moved_kib": moved_kib} | _from_one_slot(reports, reference)


def _after_checkpoint(harness: Harness, first: MeshCase, second: MeshCase, model: str) -> Values:
    reference = harness.one_slot(model)
    spec, folder = harness.spec(model), harness.new_folder()
    path, export = str(folder / "state"), str(folder / "model")
    with harness.trainer(first, model) as fleet:
        reports = [train_on(fleet, BATCHES[0])]
        saved = whole_state(fleet, spec, STATE)
        fleet.ask(dict.fromkeys(fleet.layout.slots, SaveState(path)))
        fleet.ask(dict.fromkeys(fleet.layout.slots, ExportModel(export, "float32")))
    with harness.trainer(second, model) as fleet:
        fleet.ask(dict.fromkeys(fleet.layout.slots, LoadState(path)))
        loaded = whole_state(fleet, spec, STATE)
        reports += [train_on(fleet, batch) for batch in BATCHES[1:]]
    exported = {f"model/{name}": tensor.numpy() for name, tensor in read_tensors(export, spec)}
    parameters = {name: saved[name] for name in saved if name.startswith(PARAMETERS)}
    wrong = differing(parameters, exported)
    return _changed(saved, loaded) | {"exported": len(wrong)} | _from_one_slot(reports, reference)


def _changed(before: Mapping[str, Array], after: Mapping[str, Array]) -> dict[str, float]:
    return {"tensors": len(before), "changed": len(differing(before, after))}


def _from_one_slot(reports: Sequence[StepReport], reference: Measured) -> dict[str, float]:
    """How far a trainer's steps are from those of a trainer that was on one slot all the time."""
    counted = [(report.step, report.num_tokens) for report in reports]
    assert counted == list(enumerate(reference.num_tokens, start=1)), "every step is counted, and its tokens"
    return {
        "loss": largest(np.subtract([report.loss for report in reports], reference.losses)),
        "grad_norm": largest(np.divide([report.grad_norm for report in reports], reference.grad_norms) - 1),
    }


_KINDS: dict[Kind, tuple[Callable[..., Values], Values]] = {
    "mesh": (_on_mesh, MESH_BOUNDS),
    "resize": (_after_resize, EXACT_BOUNDS),
    "streaming resize": (partial(_after_resize, memory="streaming"), EXACT_BOUNDS),
    "checkpoint": (_after_checkpoint, CHECKPOINT_BOUNDS),
    "knob": (_with_knobs, KNOB_BOUNDS),
}
