"""Chooses the order in which slots train, so that most of the state stays where it is.

stays_put(Formation((0, 1)), (0, 1, 2))    # slots 0, 2, 1: a third of the state moves; 0, 1, 2 would move half of it
"""

from collections.abc import Iterable
from math import lcm

from ductile.core.layout.layout import Layout, Tensor
from ductile.core.layout.mesh import Mesh
from ductile.core.layout.sharding import Shard, place
from ductile.core.transfer.arrange import arrange
from ductile.records import Formation


def stays_put(before: Formation, slots: Iterable[int], replicas: int = 1) -> Formation:
    """The formation of all these slots that keeps most bytes in place, coming from `before`.

    Rows are dealt out in chunks, and every tensor has many of them, so one tensor of as many rows as both formations
    can share stands for all. Raises `ValueError` when the slots cannot hold so many equal copies.
    """
    after = Formation(tuple(sorted(slots)), replicas)
    rows = lcm(_num_shards(before), _num_shards(after))
    chosen = arrange(_stand_in(before, rows), _stand_in(after, rows))
    return Formation(tuple(chosen[slot] for slot in after.members), replicas)


def _num_shards(formation: Formation) -> int:
    return len(formation.members) // formation.replicas


def _stand_in(formation: Formation, rows: int) -> Layout:
    mesh = Mesh.of(formation.members, dp=formation.replicas, fsdp=_num_shards(formation))
    return Layout([Tensor("state", "uint8", place((rows,), mesh, [Shard("fsdp")]))], formation.members)
