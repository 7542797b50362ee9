"""A part of what `make parity`, `make resize-parity` and `make knobs-parity` show, always the same one; and what is
wrong is found."""

from collections.abc import Iterator

import pytest
import torch

from ductile.parallel.data import local_shard
from ductile.trainer.train_role import TrainRole
from tests.parity.assemble import WrongParts, differing
from tests.parity.batches import BATCHES
from tests.parity.checks import Check
from tests.parity.harness import Harness
from tests.parity.measured import BOUNDS, GRADIENT, STATE, differences, measure, run_chunk, train_on, whole_state
from tests.parity.meshes import mesh
from tests.parity.plan import checkpoint_checks, knob_checks, mesh_checks_of_the_suite, resize_checks, sampled
from tests.trainer.fleet import SlotFailed

pytestmark = pytest.mark.slow

CHECKS = [
    *mesh_checks_of_the_suite(),
    *sampled(resize_checks(), 3),
    *sampled(checkpoint_checks(), 1),
    *sampled(knob_checks(), 4),
]
NUDGED = "norm.weight"


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with Harness(tmp_path_factory.mktemp("parity")) as harness:
        yield harness


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check}-{check.model}")
def test_parity(harness: Harness, check: Check) -> None:
    row = check.run(harness)
    assert row.verdict == "PASS", f"{row.line(0)}\n{row.traceback}"


def nudge(role: TrainRole, by: float) -> None:
    """Change one element of this slot's part of a weight."""
    with torch.no_grad():
        local_shard(role._live.model.get_parameter(NUDGED))[:1].mul_(1 + by)


def test_a_mesh_that_computes_something_else_is_found(harness: Harness) -> None:
    reference = harness.one_slot("llama")
    with harness.trainer(mesh(dp_shard=2), "llama") as fleet:
        fleet.call(fleet.layout.slots[1:], nudge, 0.01)
        found = differences(measure(fleet, harness.spec("llama"), BATCHES), reference)
    assert [column for column, bound in BOUNDS.items() if found[column] <= bound] == []


def test_a_bit_that_a_resize_changes_is_found(harness: Harness) -> None:
    kinds, spec = (*STATE, *GRADIENT), harness.spec("llama")
    with harness.trainer(mesh(dp_shard=2), "llama") as fleet:
        train_on(fleet, BATCHES[0])
        run_chunk(fleet, BATCHES[1].chunks[0])
        before = whole_state(fleet, spec, kinds)
        fleet.resize(mesh(dp_shard=3).layout)
        assert differing(before, whole_state(fleet, spec, kinds)) == []
        fleet.call(fleet.layout.slots[1:2], nudge, 2e-7)
        assert differing(before, whole_state(fleet, spec, kinds)) == [f"model/{NUDGED}"]


def test_a_copy_that_is_another_one_is_found(harness: Harness) -> None:
    with harness.trainer(mesh(dp_replicate=2), "llama") as fleet:
        fleet.call(fleet.layout.slots[1:], nudge, 2e-7)
        with pytest.raises(WrongParts, match=f"have the same part of model/{NUDGED}, and differ"):
            whole_state(fleet, harness.spec("llama"), STATE)


def fail(role: TrainRole) -> None:
    raise RuntimeError("this test says so")


def test_what_comes_after_a_failure_does_not_suffer(harness: Harness) -> None:
    with pytest.raises(SlotFailed, match="this test says so"), harness.trainer(mesh(dp_shard=2), "llama") as fleet:
        fleet.call(fleet.layout.slots[:1], fail)
    assert Check("mesh", (mesh(dp_shard=2),), "llama").run(harness).verdict == "PASS"
