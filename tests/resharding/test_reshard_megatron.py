"""Megatron's descriptors and attributes: column, row, vocabulary, fused, expert. Local tensors are cut by plain slicing
here, and must come out as plain slicing cuts them for the other size."""

import importlib.util
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import ductile
from ductile import MegatronModule
from tests.resharding.world import run_world

VOCAB, HIDDEN, INNER, HEADS = 10, 3, 8, (8, 4, 4)
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed (pip install ductile[bench])"
)


def whole(name: str, kind: int = 0) -> Tensor:
    """The tensor of this name, numbered throughout."""
    shapes = {
        "embedding.weight": (VOCAB, HIDDEN),
        "linear_qkv.weight": (sum(HEADS), HIDDEN),
        "linear_proj.weight": (HIDDEN, HEADS[0]),
        "linear_fc1.weight": (2 * INNER, HIDDEN),
        "linear_fc2.weight": (HIDDEN, INNER),
        "norm.weight": (HIDDEN,),
    }
    shape = shapes[name]
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1000 * list(shapes).index(name) + kind / 4


def part(tensor: Tensor, rank: int, size: int, dim: int = 0, sizes: tuple[int, ...] = ()) -> Tensor:
    """Every component's slice of this rank, one after the other."""
    components = tensor.split(sizes or [tensor.shape[dim]], dim)
    return torch.cat([c.narrow(dim, rank * (c.shape[dim] // size), c.shape[dim] // size) for c in components], dim)


def local(name: str, rank: int, size: int, kind: int = 0) -> Tensor:
    tensor = whole(name, kind)
    if name == "embedding.weight":
        rows = -(-VOCAB // (4 * size)) * 4 * size
        return part(torch.cat([tensor, torch.full((rows - VOCAB, HIDDEN), -1.0)]), rank, size)
    if name == "linear_qkv.weight":
        return part(tensor, rank, size, 0, HEADS)
    if name == "linear_fc1.weight":
        return part(tensor, rank, size, 0, (INNER, INNER))
    if name in ("linear_proj.weight", "linear_fc2.weight"):
        return part(tensor, rank, size, 1)
    return tensor


STAMPS = {
    "embedding.weight": (0, 1),
    "linear_qkv.weight": (0, 1),
    "linear_proj.weight": (1, 1),
    "linear_fc1.weight": (0, 2),
    "linear_fc2.weight": (1, 1),
    "norm.weight": None,
}


def module_of(rank: int, size: int, empty: bool) -> nn.Module:
    """As Megatron's layers stamp their parameters."""
    module = nn.Module()
    for name, stamp in STAMPS.items():
        tensor = local(name, rank, size)
        parameter = nn.Parameter(torch.full_like(tensor, -1.0) if empty else tensor)
        if stamp is not None:
            parameter.tensor_model_parallel, (parameter.partition_dim, parameter.partition_stride) = True, stamp
        layer = nn.Module()
        layer.weight = parameter
        module.add_module(name.removesuffix(".weight"), layer)
    return module


def optimizer_of(module: nn.Module, rank: int, size: int) -> torch.optim.AdamW:
    """As after five steps."""
    optimizer = torch.optim.AdamW(module.parameters())
    for name, parameter in module.named_parameters():
        moments = {"exp_avg": local(name, rank, size, 1), "exp_avg_sq": local(name, rank, size, 2)}
        optimizer.state[parameter] = {"step": torch.tensor(5.0), **moments}
    return optimizer


def described(module: nn.Module, rank: int, size: int) -> MegatronModule:
    qkv, embedding = {"linear_qkv.weight": HEADS}, {"embedding.weight": VOCAB}
    return MegatronModule(module, rank, size, parts=qkv, lengths=embedding, rename=lambda name: f"decoder.{name}")


def attributes(rank: int, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    source = target = None
    if rank in before:
        old = module_of(before.index(rank), len(before), empty=False)
        optimizer = optimizer_of(old, before.index(rank), len(before))
        source = [described(old, before.index(rank), len(before)), optimizer]
    if rank in after:
        place = after.index(rank), len(after)
        new = module_of(*place, empty=True)
        new_optimizer = torch.optim.AdamW(new.parameters())
        target = [described(new, *place), new_optimizer]
    ductile.reshard(source, target, timeout_s=20.0)
    if rank in after:
        for name, parameter in new.named_parameters():
            state = new_optimizer.state[parameter]
            assert torch.equal(parameter, local(name, *place)), name
            assert state["step"].item() == 5.0
            assert state["step"].ndim == 0
            for kind, key in enumerate(("exp_avg", "exp_avg_sq"), 1):
                expected = local(name, *place, kind)
                data = expected != -1.0  # rows behind the vocabulary are nobody's: a new moment has zeros there
                assert torch.equal(state[key], torch.where(data, expected, 0.0)), (name, key)


SIZES = [((0,), (0, 1)), ((0, 1), (3, 2, 1, 0)), ((0, 1, 2, 3), (1, 0)), ((0, 1), (2, 3)), ((3, 1), (2,))]


@pytest.mark.parametrize(("before", "after"), SIZES)
def test_a_module_and_its_optimizer_by_their_attributes(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    run_world(4, attributes, before, after)


@dataclass
class Descriptor:
    """What `megatron.core.dist_checkpointing.ShardedTensor` is documented to have."""

    key: str
    data: Tensor | None
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False


def experts(rank: int) -> list[float]:
    """Six experts of one layer, a tensor each: by twos on three ranks, by threes on two."""
    weights = torch.arange(24.0).reshape(6, 2, 2)
    source = [
        Descriptor("experts", weights[index], (2, 2), (6, 2, 2), (index, 0, 0), prepend_axis_num=1)
        for index in range(2 * rank, 2 * rank + 2)
    ]
    new = torch.zeros(3, 2, 2)
    target = {
        "anything": [
            Descriptor("experts", new[index], (2, 2), (6, 2, 2), (3 * (rank - 1) + index, 0, 0), prepend_axis_num=1)
            for index in range(3)
        ]
    }
    ductile.reshard(source, target if rank else [Descriptor("experts", None, (2, 2), (6, 2, 2), (0, 0, 0))])
    return new.flatten().tolist()


def test_descriptors_with_leading_axes() -> None:
    assert run_world(3, experts) == [[0.0] * 12, list(range(12)), list(range(12, 24))]


def megatrons_own(rank: int, sizes: list[tuple[int, int]]) -> None:
    """All sizes in one world: a rank takes two seconds to import Megatron."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, while megatron-core is imported
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    def state(place: int, size: int, fill: bool) -> tuple[dict[str, Tensor], dict[str, object]]:
        locals_ = {name: local(name, place, size) for name in STAMPS if name != "linear_qkv.weight"}
        locals_ = {name: tensor if fill else torch.full_like(tensor, -1.0) for name, tensor in locals_.items()}
        described: dict[str, object] = {}
        for name, tensor in locals_.items():
            stamp = STAMPS[name]
            axes = [] if stamp is None else [(stamp[0], place, size)]
            described[name] = ShardedTensor.from_rank_offsets(
                f"decoder.{name}",
                tensor,
                *axes,
                replica_id=0 if axes else place,
                allow_shape_mismatch=name == "embedding.weight",
            )
        described["linear_fc1.weight"] = apply_swiglu_sharded_factory(described["linear_fc1.weight"], ())
        return locals_, {"model": described}

    for before, after in sizes:
        _, source = state(rank, before, fill=True) if rank < before else (None, None)
        found, target = state(rank, after, fill=False) if rank < after else ({}, None)
        ductile.reshard(source, target, timeout_s=20.0)
        for name, tensor in found.items():
            data = local(name, rank, after) != -1.0
            assert torch.equal(tensor[data], local(name, rank, after)[data]), (before, after, name)


def padded_vocabulary(rank: int) -> list[float]:
    """Ten words, padded to twelve on three ranks and to sixteen on two, as Megatron does by itself."""
    rows = torch.arange(4.0) + 4 * rank
    source = Descriptor("embedding", rows, (4,), (12,), (4 * rank,), allow_shape_mismatch=True)
    new = torch.full((8,), -1.0)
    target = Descriptor("embedding", new, (8,), (16,), (8 * (rank - 1),), allow_shape_mismatch=True)
    ductile.reshard(source, target if rank else None, timeout_s=20.0)
    return new.tolist()


def test_a_vocabulary_that_is_padded_to_another_length() -> None:
    _, first, second = run_world(3, padded_vocabulary)
    assert first == list(range(8))
    assert second == [8.0, 9.0, 10.0, 11.0, -1.0, -1.0, -1.0, -1.0]


class Factory:
    """What `ShardedTensorFactory` is documented to have; `build_fn` describes the halves of `data`."""

    def __init__(self, data: Tensor, copies: bool) -> None:
        self.key, self.data, self.copies = "fused", data, copies

    def build_fn(self, key: str, data: Tensor) -> dict[str, Descriptor]:
        halves = [half.clone() if self.copies else half for half in data.chunk(2)]
        return {name: Descriptor(f"{key}.{name}", h, (2,), (2,), (0,)) for name, h in zip("wv", halves, strict=True)}

    def build(self) -> dict[str, Descriptor]:
        return self.build_fn(self.key, self.data)


def factories(rank: int) -> list[float]:
    source, target = Factory(torch.arange(4.0), copies=False), torch.zeros(4)
    with pytest.raises(ductile.NotReshardable, match="the factory of fused makes copies"):
        ductile.reshard(source, Factory(target, copies=True), timeout_s=20.0)
    ductile.reshard(source if rank else None, Factory(target, copies=False), timeout_s=20.0)
    return target.tolist()


def test_factories_describe_views() -> None:
    assert run_world(2, factories) == [[0, 1, 2, 3]] * 2


@needs_megatron
def test_descriptors_made_by_megatron_itself() -> None:
    run_world(4, megatrons_own, [(1, 2), (4, 2), (2, 4)])
