"""Axes over slots: coordinates and groups."""

import pytest

from ductile.core.layout.geometry.mesh import Mesh

MESH = Mesh((("dp", 3), ("tp", 2)), (7, 0, 4, 1, 9, 2))


def test_slots_lie_in_row_major_order() -> None:
    assert [(MESH.coordinate(slot, ("dp",)), MESH.coordinate(slot, ("tp",))) for slot in MESH.slots] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert MESH.coordinate(9, ("tp", "dp")) == 2, "axes taken together, the first one outermost"
    assert MESH.coordinate(9, ("pp",)) == 0
    assert (MESH.size(("dp", "tp")), MESH.size(("pp",))) == (6, 1)


def test_groups_differ_only_along_their_axes() -> None:
    assert MESH.groups(("tp",)) == [(7, 0), (4, 1), (9, 2)]
    assert MESH.groups(("dp",)) == [(7, 4, 9), (0, 1, 2)]
    assert MESH.groups(("tp", "dp")) == [(7, 4, 9, 0, 1, 2)]
    assert MESH.groups(("pp",)) == [(7,), (0,), (4,), (1,), (9,), (2,)]


@pytest.mark.parametrize(
    ("axes", "slots", "says"),
    [
        ((("dp", 2),), (0,), "need 2 slots; 1 were given"),
        ((("dp", 2),), (3, 3), "one slot appears twice"),
        ((("dp", 1), ("dp", 1)), (0,), "names must differ"),
        ((("dp", 0),), (), "at least 1"),
    ],
)
def test_what_is_no_mesh_is_refused(axes: tuple[tuple[str, int], ...], slots: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Mesh(axes, slots)


def test_the_mesh_around_a_slot_has_the_axes_asked_for_and_products_of_them() -> None:
    mesh = Mesh.of(range(12), dp_replicate=2, dp_shard=3, tp=2)
    assert mesh.around(7, ("dp_shard",)) == Mesh.of((7, 9, 11), dp_shard=3)
    assert mesh.around(7, ("dp_replicate",), ("dp_shard", "tp")) == Mesh.of(range(12), dp_replicate=2, dp_shard_tp=6)
    assert mesh.around(7, ("tp", "dp_replicate")) == Mesh.of((0, 6, 1, 7), tp_dp_replicate=4)
    assert mesh.around(7, ("dp_shard", "cp")) == Mesh.of((7, 9, 11), dp_shard_cp=3), "an axis that it lacks has size 1"
