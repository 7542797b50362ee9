"""The table has what it is to have, and every mesh is resized from and to."""

from collections import Counter

import pytest

from ductile.core.layout.model.spec import ModelSpec
from tests.parity.assemble import state_layout
from tests.parity.meshes import INTERLEAVED, MESHES, NUM_LAYERS, NUM_SLOTS, RING, ULYSSES, MeshCase
from tests.parity.model import MODELS, SHAPES
from tests.parity.plan import (
    checkpoint_checks,
    mesh_checks,
    mesh_checks_of_the_suite,
    resize_checks,
)


def test_every_mesh_is_another_one() -> None:
    assert len({case.name for case in MESHES}) == len(MESHES) >= 40
    assert {case.num_slots for case in MESHES} == {*range(1, NUM_SLOTS + 1)}


@pytest.mark.parametrize("case", MESHES, ids=str)
def test_every_mesh_is_a_layout_of_the_models(case: MeshCase) -> None:
    spec = ModelSpec("llama", 102, 32, 40, num_layers=NUM_LAYERS, num_heads=8, num_kv_heads=2, head_dim=4)
    assert case.layout.dims.dp_shard == dict(case.axes).get("dp_shard", 1)
    assert {*case.layout.slots} <= {*range(NUM_SLOTS)}
    assert {*state_layout(spec, case.layout, ("model/",)).slots} == {*case.layout.slots}


def test_slots_do_not_lie_in_their_order() -> None:
    large = [case for case in MESHES if case.num_slots > 2]
    assert sum(sorted(case.layout.slots) == list(case.layout.slots) for case in large) < len(large) / 10


def test_every_axis_is_alone_and_with_each_other() -> None:
    kinds = {frozenset(axis.split("_")[0] for axis, _ in case.axes) for case in MESHES}
    assert {frozenset(axes.split()) for axes in ("dp", "tp", "pp", "cp", "tp dp", "pp dp", "cp dp")} <= kinds
    assert {frozenset(axes.split()) for axes in ("cp tp", "pp tp", "pp cp", "pp cp tp", "cp tp dp")} <= kinds


def test_both_styles_of_cp_uneven_and_interleaved_stages_and_more_slots_than_heads() -> None:
    for axis, key in (("cp", "cp_style"), ("pp", "pp_schedule")):
        assert all(axis in dict(case.axes) for case in MESHES if key in dict(case.settings))
    assert all("cp_style" in dict(case.settings) for case in MESHES if "cp" in dict(case.axes))
    most_heads = max(shape["num_key_value_heads"] for shape in SHAPES.values())
    for axis, settings in (("tp", {}), ("cp", RING), ("cp", ULYSSES)):
        having = [case for case in MESHES if settings.items() <= dict(case.settings).items()]
        assert max(dict(case.axes).get(axis, 1) for case in having) > most_heads
    stages = {case.stages for case in MESHES if case.stages}
    assert INTERLEAVED in stages
    assert any(max(counts.values()) > min(counts.values()) for counts in map(Counter, stages))


def test_as_many_checks_as_were_asked_for() -> None:
    assert len(mesh_checks()) == len(MESHES) * len(MODELS)
    kinds = {frozenset(axis.split("_")[0] for axis, _ in check.cases[0].axes) for check in mesh_checks_of_the_suite()}
    assert {frozenset({axis}) for axis in ("dp", "tp", "pp", "cp")} <= kinds
    assert any(len(kind) > 2 for kind in kinds)
    assert len(resize_checks()) >= 80
    assert len(checkpoint_checks()) == 20
    assert {check.kind for check in resize_checks()} == {"resize", "streaming resize"}


def test_every_mesh_is_resized_from_and_to_and_with_its_own_style() -> None:
    pairs = [check.cases for check in resize_checks()]
    assert {first for first, _ in pairs} >= {*MESHES}
    assert {second for _, second in pairs} >= {*MESHES}
    assert len({*pairs}) == len(pairs)
    for first, second in [*pairs, *(check.cases for check in checkpoint_checks())]:
        assert first != second
        assert first.goes_with(second)
