"""Layouts put together from lists: the same as those that are computed from a mesh, and refusals by name."""

import numpy as np
import pytest

from ductile.core.layout.geometry.holdings import row_major
from ductile.core.layout.geometry.mesh import Mesh
from ductile.core.layout.geometry.sharding import Shard, place
from ductile.resharding.described import Disagreement, Held, Piece, assemble, buffer_name, trim


def test_described_rows_are_those_that_a_mesh_gives() -> None:
    mesh = Mesh.of(range(4), dp_shard=4)
    expected = place((10, 3), mesh, [Shard("dp_shard")])
    described = {
        slot: [
            Held(("w", "v"), "float32", (10, 3), (Piece((3 * slot, 0), (min(3, 10 - 3 * slot), 3), row_major((3, 3))),))
        ]
        for slot in mesh.slots
    }
    layout = assemble(described, "source")
    assert list(layout.tensors) == ["w", "v"]
    assert layout["w"].holdings is layout["v"].holdings
    found = layout["w"].holdings
    assert found.geometry == expected.geometry
    np.testing.assert_array_equal(found.strides, expected.strides)
    assert layout.buffer_sizes(3) == {"w": ("float32", 3), "v": ("float32", 3)}


def test_a_slot_without_data_takes_part() -> None:
    whole = Held(("step",), "int64", (), (Piece((), (), ()),))
    layout = assemble({0: [whole], 1: []}, "source")
    assert layout.slots == (0, 1)
    assert layout["step"].shape == (1,)
    assert layout.buffer_sizes(1) == {}


def test_pieces_lie_in_buffers_of_their_own() -> None:
    pieces = (Piece((2, 0), (2, 3), (3, 1)), Piece((6, 0), (2, 3), (5, 1)))
    layout = assemble({0: [Held(("gate_up",), "bfloat16", (8, 3), pieces)]}, "target")
    assert layout.buffer_sizes(0) == {"gate_up": ("bfloat16", 6), buffer_name("gate_up", 1): ("bfloat16", 8)}
    view = layout["gate_up"].holdings.view(0, ((7, 1), (8, 3)))
    assert (view.buffer, view.offset, view.strides) == (1, 6, (5, 1))


def test_both_sides_of_a_disagreement_are_told() -> None:
    one = Held(("w",), "float32", (4,), (Piece((0,), (2,), (1,)),))
    other = Held(("w",), "float32", (5,), (Piece((2,), (2,), (1,)),))
    with pytest.raises(Disagreement, match=r"w: in the source, rank 0 has float32 \[4\] and rank 3 has float32 \[5\]"):
        assemble({0: [one], 3: [other]}, "source")


def test_a_block_that_is_listed_twice_is_refused() -> None:
    twice = Held(("w",), "float32", (4,), (Piece((0,), (3,), (1,)), Piece((2,), (2,), (1,))))
    with pytest.raises(Disagreement, match=r"w: in the target, rank 1 lists the block at \[2\] of size \[2\]"):
        assemble({1: [twice]}, "target")


def test_a_padded_tensor_is_cut_down_to_what_is_data() -> None:
    rows = [Held(("vocab", "other"), "float32", (12,), (Piece((4 * slot,), (4,), (1,)),), True) for slot in range(3)]
    whole = assemble({slot: [held] for slot, held in enumerate(rows)}, "source")
    layout = trim(whole, {"vocab": (6,)})
    assert layout["vocab"].shape == (6,)
    assert [layout["vocab"].holdings.rows_of(slot) for slot in range(3)] == [
        [((0,), (4,), 0, (1,), 0)],
        [((4,), (6,), 0, (1,), 0)],
        [],
    ]
    assert layout.buffer_sizes(2) == {"vocab": ("float32", 4), "other": ("float32", 4)}
    assert layout["other"].holdings is whole["other"].holdings
