"""Process groups of the axes of a layout, between real processes."""

import torch
import torch.distributed as dist

from ductile.core.layout.geometry.layout import Layout, Tensor
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.sharding import Shard, place
from ductile.fabric.groups import Groups
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.parts import SlotParts
from tests.ranks import run_ranks

SLOTS = (5, 1, 4, 2)


def sums_and_places(groups: Groups, members: tuple[int, ...]) -> dict[str, object]:
    context = ParallelContext(groups, ParallelLayout.of(members, dp_replicate=2, tp=2))
    sums: dict[str, object] = {}
    for axes in (("tp",), ("dp_replicate",), ("tp", "dp_replicate"), ("cp",)):
        value = torch.tensor([float(groups.slot)])
        dist.all_reduce(value, group=context.group(*axes))
        sums["+".join(axes)] = value.item()
    # Each slot of tp has a half of one gradient, [3, 4], and all of another one, [12]; both copies have all of both.
    half = torch.tensor([3.0 + context.layout.coordinates(groups.slot)["tp"]])
    mesh = context.layout.mesh
    layout = Layout(
        [Tensor("half", "float32", place((2,), mesh, [Shard("tp")])), Tensor("all", "float32", place((1,), mesh))],
        mesh.slots,
    )
    gradients = {"half": half, "all": torch.tensor([12.0])}
    sums["norm"] = context.sum(context.share_of_square(gradients, SlotParts(layout, groups.slot))).sqrt().item()
    sums["tokens"] = context.sum(torch.tensor(100.0 * context.counts_samples)).item()
    sums["rank"] = context.data_parallel_rank
    sums["first"] = context.is_first
    sums["said"] = [context.said_by_first(f"{said} of slot {groups.slot}") for said in ("é" * 250, "")]
    sums["mesh"] = context.mesh.mesh.tolist()
    return sums


def test_every_axis_and_every_product_of_axes_has_a_group() -> None:
    found = dict(zip(SLOTS, run_ranks(4, sums_and_places, slots=SLOTS), strict=True))
    all_slots = float(sum(SLOTS))
    assert [found[slot]["tp"] for slot in SLOTS] == [6.0, 6.0, 6.0, 6.0]
    assert [found[slot]["dp_replicate"] for slot in SLOTS] == [9.0, 3.0, 9.0, 3.0]
    assert [found[slot]["tp+dp_replicate"] for slot in SLOTS] == [all_slots] * 4
    assert [found[slot]["cp"] for slot in SLOTS] == [float(slot) for slot in SLOTS]
    assert [found[slot]["norm"] for slot in SLOTS] == [13.0] * 4
    assert [found[slot]["tokens"] for slot in SLOTS] == [200.0] * 4, "slots along tp run the same tokens"
    assert [found[slot]["rank"] for slot in SLOTS] == [0, 0, 1, 1]
    assert [found[slot]["first"] for slot in SLOTS] == [True, False, False, False]
    assert [found[slot]["said"] for slot in SLOTS] == [["é" * 250 + " of slot 5", " of slot 5"]] * 4
    assert [found[slot]["mesh"] for slot in SLOTS] == [[[5], [4]], [[1], [2]], [[5], [4]], [[1], [2]]]
