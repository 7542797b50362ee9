"""Pairs of layouts that people have, written as recipes: the twin cuts index arrays for them by plain slicing."""

from dataclasses import replace

from ductile.core.layout.geometry.mesh import Mesh
from tests.core.transfer.twin import Logical, Recipe

HEADS = ((24, 4), (12, 2), (12, 2))
"""Query, key, value: 4 heads of 6, two of each of the others."""

DENSE = (
    Logical("a embedding", (33, 12), "float32", tp_dim=0),
    Logical("b qkv", (48, 12), "float32", 0, HEADS),
    Logical("c out", (12, 24), "float32", tp_dim=1),
    Logical("d gate up", (40, 12), "float32", 0, ((20, 20), (20, 20))),
    Logical("e down", (12, 20), "float32", tp_dim=1),
    Logical("f norm", (12,), "float32"),
    Logical("g head", (33, 12), "float32", tp_dim=0),
)
"""The vocabulary is not divisible by anything, so it is padded."""
MIXED = (
    Logical("a weight", (21, 10), "bfloat16", tp_dim=0),
    Logical("b master", (21, 10), "float32", tp_dim=0),
    Logical("c moment", (21, 10), "float64", tp_dim=1),
    Logical("d scales", (21, 2), "float8_e4m3fn"),
    Logical("e step", (1,), "int64"),
    Logical("f seen", (13,), "bool"),
    Logical("g counts", (13,), "int32"),
    Logical("h half", (7, 3), "float16", tp_dim=0),
    Logical("i tokens", (5,), "int16"),
    Logical("j bytes", (11,), "uint8"),
)
"""Odd counts, so that items of two bytes follow items of one on the wire."""
EXPERTS = (
    Logical("a router", (8, 6), "float32"),
    Logical("b experts", (8, 10, 6), "float32", experts=True),
    Logical("c tall experts", (8, 6, 10), "bfloat16", tp_dim=2, experts=True),
    Logical("d bias", (8,), "float32"),
)
LARGE = (Logical("a large", (1200, 1024), "float32", tp_dim=0), Logical("b wide", (600, 1024), "float32", tp_dim=1))
"""Parts above a MiB travel by themselves."""


def dense(slots: range | list[int], stages: tuple[tuple[int, ...], ...] | None = None, **axes: int) -> Recipe:
    return Recipe(DENSE, Mesh.of(slots, **axes), stages or ((0,),) * len(DENSE), vocab_multiple=2)


def flat(slots: range | list[int], stages: tuple[tuple[int, ...], ...] | None = None, **axes: int) -> Recipe:
    return replace(dense(slots, stages, **axes), zero=True)


def mixed(slots: range | list[int], **axes: int) -> Recipe:
    return Recipe(MIXED, Mesh.of(slots, **axes), ((0,),) * len(MIXED))


def experts(slots: range | list[int], unstacked: bool = False, **axes: int) -> Recipe:
    return Recipe(EXPERTS, Mesh.of(slots, **axes), ((0,),) * len(EXPERTS), unstacked=unstacked)


def large(slots: range | list[int], **axes: int) -> Recipe:
    return Recipe(LARGE, Mesh.of(slots, **axes), ((0,),) * len(LARGE))


FRONT_BACK = ((0,), (0,), (0,), (0,), (1,), (1,), (1,))
UNEVEN = ((0,), (1,), (1,), (1,), (1,), (1,), (1,))
TIED = ((0, 1), (0,), (0,), (1,), (1,), (1,), (1,))
"""The embedding serves both ends: two stages have it, as one tensor."""
TIED_WHOLE = ((0,),) * 7

PAIRS: dict[str, tuple[Recipe, Recipe]] = {
    # The demo of everybody: more and fewer replicas.
    "tp2 dp1 to 2": (dense(range(2), tp=2), dense(range(4), dp_replicate=2, tp=2)),
    "tp2 dp1 to 3": (dense(range(2), tp=2), dense(range(6), dp_replicate=3, tp=2)),
    "tp2 dp1 to 4": (dense(range(2), tp=2), dense(range(8), dp_replicate=4, tp=2)),
    "tp2 dp4 to 1": (dense(range(8), dp_replicate=4, tp=2), dense(range(2), tp=2)),
    "tp2 dp1 to 4, zero": (flat(range(2), dp_replicate=1, tp=2), flat(range(8), dp_replicate=4, tp=2)),
    "tp2 dp4 to 1, zero": (flat(range(8), dp_replicate=4, tp=2), flat(range(2), dp_replicate=1, tp=2)),
    "tp4 dp1 to 2": (dense(range(4), tp=4), dense(range(8), dp_replicate=2, tp=4)),
    "tp4 dp2 to 1, zero": (flat(range(8), dp_replicate=2, tp=4), flat(range(4), dp_replicate=1, tp=4)),
    # Odd numbers of replicas: uneven ranges of flat state.
    "dp1 to 3, zero": (flat(range(1), dp_replicate=1), flat(range(3), dp_replicate=3)),
    "dp2 to 3, zero": (flat(range(2), dp_replicate=2), flat(range(3), dp_replicate=3)),
    "dp3 to 2, zero": (flat(range(3), dp_replicate=3), flat(range(2), dp_replicate=2)),
    "dp5 to 4, zero": (flat(range(5), dp_replicate=5), flat(range(4), dp_replicate=4)),
    "dp2 to 3, newcomer between, zero": (flat(range(2), dp_replicate=2), flat([0, 2, 1], dp_replicate=3)),
    # The same slots, other axes.
    "tp2 to 1": (dense(range(2), tp=2), dense(range(1), tp=1)),
    "tp1 to 2": (dense(range(1), tp=1), dense(range(2), tp=2)),
    "tp2 to 4": (dense(range(2), tp=2), dense(range(4), tp=4)),
    "tp4 to 8, more slots than key heads": (dense(range(4), tp=4), dense(range(8), tp=8)),
    "tp8 to 3": (dense(range(8), tp=8), dense(range(2), dp_replicate=1, dp_shard=2)),
    "pp2 to 1": (dense(range(2), FRONT_BACK, pp=2), dense(range(1))),
    "pp1 to 2": (dense(range(1)), dense(range(2), FRONT_BACK, pp=2)),
    "tp2 pp2 to tp1 pp1": (dense(range(4), FRONT_BACK, pp=2, tp=2), dense(range(1))),
    "tp2 to pp2": (dense(range(2), tp=2), dense(range(2), FRONT_BACK, pp=2)),
    "pp2 to tp2 pp2 dp2": (dense(range(2), FRONT_BACK, pp=2), dense(range(8), FRONT_BACK, pp=2, dp_replicate=2, tp=2)),
    "uneven stages": (dense(range(4), FRONT_BACK, pp=2, tp=2), dense(range(4), UNEVEN, pp=2, tp=2)),
    "tied, split": (dense(range(2), tp=2), dense(range(4), TIED, pp=2, tp=2)),
    "tied, joined": (dense(range(4), TIED, pp=2, tp=2), dense(range(2), TIED_WHOLE, tp=2)),
    "tied, zero": (flat(range(4), TIED, pp=2, dp_replicate=2), flat(range(3), TIED_WHOLE, dp_replicate=3)),
    # Fully sharded.
    "fsdp2 to 3": (dense(range(2), dp_shard=2), dense(range(3), dp_shard=3)),
    "fsdp3 to 4": (dense(range(3), dp_shard=3), dense(range(4), dp_shard=4)),
    "fsdp4 to 1": (dense(range(4), dp_shard=4), dense(range(1), dp_shard=1)),
    "fsdp7 to 8, empty shards": (dense(range(7), dp_shard=7), dense(range(8), dp_shard=8)),
    "hsdp to fsdp": (dense(range(6), dp_replicate=2, dp_shard=3), dense(range(6), dp_shard=6)),
    "hsdp 2x3 to 3x2": (dense(range(6), dp_replicate=2, dp_shard=3), dense(range(6), dp_replicate=3, dp_shard=2)),
    "fsdp on tp": (dense(range(6), dp_shard=3, tp=2), dense(range(8), dp_shard=2, tp=4)),
    "fsdp on tp to zero": (dense(range(4), dp_shard=2, tp=2), dense(range(4), dp_replicate=4)),
    # Experts.
    "ep2 to 4": (experts(range(2), ep=2), experts(range(4), ep=4)),
    "ep2 to 1": (experts(range(2), ep=2), experts(range(1), ep=1)),
    "ep4 to 3": (experts(range(4), ep=4), experts(range(3), ep=3)),
    "tp4 to ep4": (experts(range(4), tp=4), experts(range(4), ep=4)),
    "tp4 to tp2 ep2": (experts(range(4), tp=4), experts(range(4), ep=2, tp=2)),
    "fused experts to single ones": (experts(range(2), ep=2), experts(range(4), True, ep=2, tp=2)),
    "single experts to fused ones": (experts(range(4), True, ep=4), experts(range(4), ep=2, dp_shard=2)),
    # Other slots.
    "moves house": (dense(range(4), dp_shard=2, tp=2), dense(range(4, 8), dp_shard=2, tp=2)),
    "moves house and fans out": (dense(range(1)), dense(range(2, 8), dp_replicate=6)),
    "half leave, half join": (dense(range(4), dp_shard=4), dense(range(2, 6), dp_shard=4)),
    "the others, reversed": (dense([3, 1, 0], dp_shard=3), dense([6, 3, 2, 5, 1], dp_shard=5)),
    "nothing to do": (dense(range(3), dp_shard=3), dense(range(3), dp_shard=3)),
    # Other contents.
    "mixed dtypes": (mixed(range(3), tp=3), mixed(range(4), dp_shard=2, tp=2)),
    "mixed dtypes, fan-out": (mixed(range(2), dp_shard=2), mixed(range(7), dp_replicate=7)),
    "large": (large(range(2), tp=2), large(range(3), dp_shard=3)),
}
assert len(PAIRS) >= 48
