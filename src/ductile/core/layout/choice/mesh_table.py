"""A trainer's mesh on paper: which slot is where, and what lies there. Few slots have a row each, many a row a stage.

slot  pp  dp_shard  tp   layers                  of the state
   0   0         0   0   0-18, embeddings       12.2 %   1.4 GiB
   1   0         0   1   0-18, embeddings       12.2 %   1.4 GiB
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ductile.core.layout.choice.layout_text import compact
from ductile.core.layout.geometry.parallel_layout import AXES, ParallelLayout
from ductile.core.layout.geometry.strategy import model_layout
from ductile.core.layout.model.parameters import frozen_names
from ductile.core.layout.model.spec import ModelSpec

MOST_ROWS = 16
"""Slots that have a row each; of more, those of a stage have one together."""


@dataclass(frozen=True, slots=True)
class EachBytes:
    """Bytes that a trainer keeps for a parameter."""

    trained: float
    """Bytes of one that is trained, of its gradient and of what the optimizer keeps for it, on average."""
    frozen: int
    """Bytes of one that is not."""


@dataclass(frozen=True, slots=True)
class SlotShare:
    """What one slot has of the trainer's state."""

    layers: str
    """Layers, and which embeddings: "0-18, embeddings"."""
    numbers: int
    """Parameters of which the slot has its part."""
    trained: int
    """Those that are trained: as many numbers has the gradient, and each moment."""

    def num_bytes(self, each: EachBytes) -> int:
        return int(self.trained * each.trained) + (self.numbers - self.trained) * each.frozen


def slot_shares(spec: ModelSpec, layout: ParallelLayout) -> dict[int, SlotShare]:
    """What every slot of the layout has."""
    stages = layout.stages_of(spec.num_layers)
    held, trained, frozen = dict.fromkeys(layout.slots, 0), dict.fromkeys(layout.slots, 0), frozen_names(spec)
    for tensor in model_layout(spec, layout, "float32"):
        for slot, _, size in tensor.holdings.sizes:
            held[slot] += size
            trained[slot] += size * (tensor.name not in frozen)
    names = [_layers(spec, stages, stage, layout.dims.pp) for stage in range(layout.dims.pp)]
    return {
        slot: SlotShare(names[layout.mesh.coordinate(slot, ("pp",))], held[slot], trained[slot])
        for slot in layout.slots
    }


def mesh_table(spec: ModelSpec, layout: ParallelLayout, each: EachBytes) -> list[str]:
    """Lines for people."""
    shares = slot_shares(spec, layout)
    if len(layout.slots) == 1:
        (share,) = shares.values()
        return [f"slot {layout.first} has all of the state: {in_bytes(share.num_bytes(each))}"]
    if len(layout.slots) <= MOST_ROWS:
        return _a_row_each(spec, layout, shares, each)
    lines = [numbering(layout)]
    rows = [("slots", "layers", "of the state")]
    by_stage = groupby(layout.slots, key=lambda slot: layout.mesh.coordinate(slot, ("pp",)))
    for _, slots in by_stage:
        stage = tuple(slots)
        rows.append((compact(stage), shares[stage[0]].layers, _share(spec, [shares[s] for s in stage], each)))
    return [*lines, *_aligned(rows, "<<>")]


def numbering(layout: ParallelLayout) -> str:
    """How coordinates make a slot's number: "slot = 8 pp + 4 dp_shard + tp"."""
    addends: list[str] = []
    stride = len(layout.slots)
    for axis in AXES:
        size = getattr(layout.dims, axis)
        stride //= size
        if size > 1:
            addends.append(axis if stride == 1 else f"{stride} {axis}")
    first, last = min(layout.slots), max(layout.slots)
    if layout.slots == tuple(range(first, last + 1)):
        return f"slot = {' + '.join([*([str(first)] if first else []), *addends])}"
    return f"rank = {' + '.join(addends)}, counted through slots {compact(layout.slots)}"


def _a_row_each(spec: ModelSpec, layout: ParallelLayout, shares: Mapping[int, SlotShare], each: EachBytes) -> list[str]:
    axes = [axis for axis in AXES if getattr(layout.dims, axis) > 1]
    rows = [("slot", *axes, "layers", "of the state")]
    for slot in layout.slots:
        at = layout.coordinates(slot)
        share = _share(spec, [shares[slot]], each)
        rows.append((str(slot), *(str(at[axis]) for axis in axes), shares[slot].layers, share))
    return _aligned(rows, ">" * (1 + len(axes)) + "<>")


def _share(spec: ModelSpec, shares: Sequence[SlotShare], each: EachBytes) -> str:
    """Share of one slot; of several the smallest and the largest, where they differ in print."""
    in_order = sorted(shares, key=lambda share: share.numbers)
    ends = (in_order[0], in_order[-1])
    percents = list(dict.fromkeys(f"{100 * share.numbers / spec.num_parameters:.3g}" for share in ends))
    sizes = list(dict.fromkeys(in_bytes(share.num_bytes(each)) for share in ends))
    of_each = " each" if len(shares) > 1 else ""
    return f"{' to '.join(percents)} %   {' to '.join(sizes)}{of_each}"


def _layers(spec: ModelSpec, stages: Sequence[int], stage: int, pp: int) -> str:
    layers = compact([layer for layer, owner in enumerate(stages) if owner == stage])
    first, last = stage == 0, stage == pp - 1
    head = "tied embeddings" if spec.tie_embeddings else "head" if not first else "embeddings, head"
    return f"{layers}, {head}" if last else f"{layers}, embeddings" if first else layers


def in_bytes(number: float) -> str:
    """Bytes for a person: "12.6 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.3g} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def _aligned(rows: Sequence[tuple[str, ...]], sides: str) -> list[str]:
    """Columns two spaces apart, each to the left (<) or to the right (>)."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
