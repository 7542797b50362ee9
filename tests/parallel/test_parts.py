"""A slot's part of each tensor, on meshes with every axis: filled, saved and loaded by boxes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.strategy import model_layout
from ductile.core.layout.model.parameters import parameters
from ductile.core.layout.model.spec import ModelSpec
from ductile.fabric.groups import Groups
from ductile.parallel import data
from ductile.parallel import distributed_checkpoint as state
from ductile.parallel.distributed_checkpoint import HeldTensor
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.parts import SlotParts
from tests.ranks import run_ranks

SPEC = ModelSpec("qwen3", 31, 16, 24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, qk_norm=True)
LAYOUTS = {
    "one slot": ParallelLayout.of((0,)),
    "dp3": ParallelLayout.of((2, 0, 1)),
    "tp4": ParallelLayout.of(range(4), tp=4),
    "dp2 tp2": ParallelLayout.of((3, 1, 2, 0), tp=2),
    "pp2 cp2": ParallelLayout.of(range(4), stages=(0, 1, 1), pp=2, cp=2),
    "hsdp": ParallelLayout.of(range(4), dp_replicate=2),
}


def whole() -> dict[str, Tensor]:
    """The numbers 1, 2, 3 and so on, in the shapes of the model's parameters."""
    found: dict[str, Tensor] = {}
    start = 1
    for parameter in parameters(SPEC):
        size = torch.Size(parameter.shape).numel()
        found[parameter.name] = torch.arange(start, start + size, dtype=torch.float32).view(parameter.shape)
        start += size
    return found


def local(layout: ParallelLayout, slot: int, value: float = 0.0) -> dict[str, Tensor]:
    """Memory for a slot's parts."""
    described = model_layout(SPEC, layout)
    return {name: torch.full((size,), value) for name, (_, size) in described.buffer_sizes(slot).items()}


def as_it_should_be(layout: ParallelLayout, slot: int) -> dict[str, Tensor]:
    """A slot's parts, put together number by number."""
    described = model_layout(SPEC, layout)
    found, full = local(layout, slot), whole()
    for name, flat in found.items():
        for start, stop, offset, strides, _ in described[name].holdings.rows_of(slot):
            for index in torch.cartesian_prod(*(torch.arange(a, b) for a, b in zip(start, stop, strict=True))):
                place = index.view(-1).tolist()
                inside = sum((i - a) * stride for i, a, stride in zip(place, start, strides, strict=True))
                flat[offset + inside] = full[name][tuple(place)]
    return found


class Flat(nn.Module):
    """Parameters that are flat already, by the names of the model's."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def named_parameters(self, *_: object, **__: object):  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self.tensors.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_slot_takes_its_part_of_full_tensors_and_rows_of_padding_are_zero(name: str) -> None:
    layout = LAYOUTS[name]
    for slot in layout.slots:
        mine = local(layout, slot, value=torch.nan)
        data.fill(Flat(mine), whole().items(), SlotParts.of(SPEC, layout, slot))  # pyright: ignore[reportArgumentType]
        for parameter, expected in as_it_should_be(layout, slot).items():
            assert torch.equal(mine[parameter], expected), (slot, parameter)


def test_a_full_tensor_of_another_shape_is_refused() -> None:
    parts = SlotParts.of(SPEC, LAYOUTS["tp4"], 1)
    with pytest.raises(ValueError, match=r"norm.weight has shape \[3\], the model wants \[16\]"):
        data.fill(nn.Module(), [("norm.weight", torch.zeros(3))], parts)


@pytest.mark.parametrize(
    ("before", "after"), [("tp4", "dp3"), ("pp2 cp2", "dp2 tp2"), ("hsdp", "tp4"), ("dp2 tp2", "pp2 cp2")]
)
def test_what_one_mesh_saves_another_one_loads(tmp_path: Path, before: str, after: str) -> None:
    for name, task in ((before, save), (after, load)):
        layout = LAYOUTS[name]
        run_ranks(len(layout.slots), task, layout, tmp_path, slots=layout.slots)


def save(groups: Groups, members: tuple[int, ...], layout: ParallelLayout, path: Path) -> None:
    context, parts = ParallelContext(groups, layout), SlotParts.of(SPEC, layout, groups.slot)
    mine = as_it_should_be(layout, groups.slot)
    state.save({name: HeldTensor(flat, parts, name) for name, flat in mine.items()}, path, context)


def load(groups: Groups, members: tuple[int, ...], layout: ParallelLayout, path: Path) -> None:
    context, parts = ParallelContext(groups, layout), SlotParts.of(SPEC, layout, groups.slot)
    mine = local(layout, groups.slot)
    state.load({name: HeldTensor(flat, parts, name) for name, flat in mine.items()}, path, context)
    for name, expected in as_it_should_be(layout, groups.slot).items():
        assert torch.equal(mine[name], expected), name
