"""Random states and random pairs of layouts over all axes, for hypothesis.

`DUCTILE_PLAN_SLOTS=64` makes larger ones.
"""

import os
from dataclasses import replace
from math import prod

from hypothesis import strategies as st

from ductile.core.layout.geometry.mesh import Mesh
from tests.core.transfer.twin import Logical, Recipe

MAX_SLOTS = int(os.environ.get("DUCTILE_PLAN_SLOTS", "12"))
AXES = ("pp", "dp_replicate", "dp_shard", "ep", "tp")


@st.composite
def logical_tensors(draw: st.DrawFn) -> tuple[Logical, ...]:
    tensors: list[Logical] = []
    for index in range(draw(st.integers(1, 4))):
        dims = draw(st.integers(1, 3))
        shape = tuple(draw(st.integers(1, 9)) for _ in range(dims))
        dtype = draw(st.sampled_from(("float32", "bfloat16", "uint8", "int64")))
        kind = draw(st.sampled_from(("plain", "column", "row", "gate_up", "qkv", "experts")))
        name = chr(ord("a") + 7 * index)
        if kind == "column":
            tensors.append(Logical(name, shape, dtype, tp_dim=0))
        elif kind == "row":
            tensors.append(Logical(name, shape, dtype, tp_dim=dims - 1))
        elif kind == "gate_up":
            inner = draw(st.integers(1, 6))
            tensors.append(Logical(name, (2 * inner, *shape[1:]), dtype, 0, ((inner, inner),) * 2))
        elif kind == "qkv":
            keys, group, head = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
            query = (keys * group * head, keys * group)
            parts = (query, (keys * head, keys), (keys * head, keys))
            tensors.append(Logical(name, (sum(p for p, _ in parts), *shape[1:]), dtype, 0, parts))
        elif kind == "experts":
            shape = (*shape, 2) if dims == 1 else shape
            tp_dim = draw(st.sampled_from((None, len(shape) - 1)))
            tensors.append(Logical(name, shape, dtype, tp_dim, experts=True))
        else:
            tensors.append(Logical(name, shape, dtype))
    same = draw(st.integers(0, 2))  # layers: further tensors of the first one's class
    first = tensors[0]
    copies = [
        Logical(f"{first.name}{n}", first.shape, first.dtype, first.tp_dim, first.parts, first.experts)
        for n in range(same)
    ]
    return (*tensors, *copies)


@st.composite
def meshes(draw: st.DrawFn, universe: int) -> Mesh:
    order = draw(st.permutations(AXES))
    budget = draw(st.one_of(st.just(MAX_SLOTS), st.integers(1, MAX_SLOTS)))
    axes: dict[str, int] = {}
    for axis in order[: draw(st.integers(1, len(AXES)))]:
        size = draw(st.integers(1, max(1, min(budget, 16))))
        budget //= size
        axes[axis] = size
    slots = draw(st.permutations(range(universe)))
    return Mesh.of(slots[: prod(axes.values())], **axes)


@st.composite
def recipes(draw: st.DrawFn, tensors: tuple[Logical, ...], universe: int) -> Recipe:
    mesh = draw(meshes(universe))
    num_stages = mesh.size(("pp",))
    stages = []
    for _ in tensors:
        first = draw(st.integers(0, num_stages - 1))
        tied = draw(st.booleans()) and draw(st.booleans())
        stages.append(tuple(sorted({first, num_stages - 1})) if tied else (first,))
    zero = draw(st.booleans())
    return Recipe(
        tensors,
        mesh,
        tuple(stages),
        vocab_multiple=draw(st.integers(1, 3)),
        zero=zero,
        unstacked=not zero and draw(st.booleans()),
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Recipe, Recipe]:
    """Two layouts of one state. Their slots are the same, overlap, or have none in common."""
    tensors = draw(logical_tensors())
    universe = MAX_SLOTS + draw(st.sampled_from((0, MAX_SLOTS // 2, MAX_SLOTS)))
    source = draw(recipes(tensors, universe))
    if draw(st.booleans()):
        return source, draw(recipes(tensors, universe))
    return source, _more_replicas(draw, source, universe)


def _more_replicas(draw: st.DrawFn, source: Recipe, universe: int) -> Recipe:
    """The same shards, each on more slots: the case for relays."""
    axes = dict(source.mesh.axes)
    others = prod(size for axis, size in axes.items() if axis != "dp_replicate")
    axes["dp_replicate"] = draw(st.integers(1, max(1, universe // others)))
    slots = draw(st.permutations(range(universe)))[: prod(axes.values())]
    return replace(source, mesh=Mesh.of(slots, **axes), zero=False)
