"""Any placements on any ranks, moved on real processes: every tensor is filled with its own global index, bit patterns
that no arithmetic survives included, and must come out as the same index under the other layout."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ductile
from tests.parallel.world import run_world

Mesh = tuple[tuple[int, ...], tuple[int, ...]]
"""(shape, ranks in row-major order)"""
Side = tuple[Mesh, list[Placement]]

SHAPE = (11, 6)


def index(shape: tuple[int, ...], dtype: torch.dtype, kind: int) -> Tensor:
    """Every element its own bit pattern; as floats, some of them are NaNs with a payload, denormals and -0.0."""
    count = torch.Size(shape).numel()
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    values = torch.arange(count, dtype=torch.int64) * 0x9E3779B1 + kind
    if dtype == torch.float32 and count > 2:
        values[:2] = torch.tensor([0x7FC12345, -0x80000000])
    return values.to(words).reshape(shape) % 2 if dtype == torch.bool else values.to(words).view(dtype).reshape(shape)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def mesh_of(mesh: Mesh) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(mesh[1]).reshape(mesh[0]))


def spread(whole: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor | None:
    """By torch's own splitting; None on ranks outside."""
    tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return None if mesh.get_coordinate() is None else tensor


def moved(rank: int, source: Side, target: Side, carrier: str) -> str:
    """Several tensors from one side to the other. Returns the carrier's sentence."""
    meshes = [mesh_of(side[0]) for side in (source, target)]
    wholes = {
        "weight": index(SHAPE, torch.float32, 1),
        "half": index(SHAPE, torch.bfloat16, 2),
        "counts": index((13,), torch.int64, 3),
        "mask": index((5, 3), torch.bool, 4),
    }
    sides = []
    for mesh, (_, placements) in zip(meshes, (source, target), strict=True):
        fitting = {name: [p if whole.ndim > 1 else one_dim(p) for p in placements] for name, whole in wholes.items()}
        sides.append({name: spread(whole, mesh, fitting[name]) for name, whole in wholes.items()})
    before, wanted = sides
    after = {name: None if tensor is None else torch.zeros_like(tensor) for name, tensor in wanted.items()}
    report = ductile.reshard(before, after, timeout_s=20.0, carrier=carrier)
    assert report.plan.wire_bytes == report.plan.lower_bound_bytes
    for name, tensor in after.items():
        if tensor is not None:
            expected = wanted[name].to_local()
            assert torch.equal(bits(tensor.to_local()), bits(expected)), (name, rank)
    return report.carrier


def one_dim(placement: Placement) -> Placement:
    return Replicate() if isinstance(placement, Shard) and placement.dim else placement


def line(*ranks: int) -> Mesh:
    return (len(ranks),), ranks


PAIRS: dict[str, tuple[int, Side, Side]] = {
    "two to three": (3, (line(0, 1), [Shard(0)]), (line(0, 1, 2), [Shard(0)])),
    "three to two": (3, (line(0, 1, 2), [Shard(0)]), (line(0, 1), [Shard(0)])),
    "four to one": (4, (line(0, 1, 2, 3), [Shard(0)]), (line(2), [Shard(0)])),
    "disjoint": (4, (line(0, 1), [Shard(0)]), (line(3, 2), [Shard(0)])),
    "overlapping": (4, (line(0, 1, 2), [Shard(0)]), (line(3, 1), [Shard(1)])),
    "sixteen pieces of eleven rows": (4, (line(0, 1, 2), [Shard(0)]), (((2, 2), (3, 1, 0, 2)), [Shard(0), Shard(0)])),
    "rows to columns": (3, (line(0, 1, 2), [Shard(0)]), (line(0, 1, 2), [Shard(1)])),
    "replicas to shards": (3, (line(0, 1, 2), [Replicate()]), (line(0, 1, 2), [Shard(0)])),
    "shards to replicas": (3, (line(0, 1, 2), [Shard(0)]), (line(0, 1, 2), [Replicate()])),
    "hybrid to plain": (4, (((2, 2), (0, 1, 2, 3)), [Replicate(), Shard(0)]), (line(0, 1, 2, 3), [Shard(0)])),
    "fsdp on tp to columns": (
        4,
        (((2, 2), (0, 1, 2, 3)), [_StridedShard(0, split_factor=2), Shard(0)]),
        (((2, 2), (0, 2, 1, 3)), [Shard(0), Shard(1)]),
    ),
    "plain to fsdp on tp": (
        4,
        (line(0, 1, 2), [Shard(0)]),
        (((2, 2), (0, 1, 2, 3)), [_StridedShard(0, split_factor=2), Shard(0)]),
    ),
    "strips alone": (4, (line(0, 1), [_StridedShard(0, split_factor=3)]), (line(3, 2, 1), [Shard(0)])),
}


@pytest.mark.parametrize("carrier", ["auto", "p2p"])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_element_finds_its_place(pair: str, carrier: str) -> None:
    size, source, target = PAIRS[pair]
    (sentence,) = set(run_world(size, moved, source, target, carrier))
    assert sentence.startswith("p2p: only messages were asked for" if carrier == "p2p" else "peer_memory:")
