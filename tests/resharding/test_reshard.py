"""Any placements on any ranks, moved on real processes: every tensor is filled with its own global index, bit patterns
that no arithmetic survives included, and must come out as the same index under the other layout."""

import gc
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ductile
from ductile import Block, NotReshardable
from ductile.core.layout.geometry import mesh as mesh_of_slots
from ductile.fabric.groups import Groups
from tests.nightly import mostly_nightly
from tests.ranks import run_ranks
from tests.resharding.world import run_world

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


@pytest.mark.parametrize("carrier", mostly_nightly(["auto", "p2p"], "p2p"))
@pytest.mark.parametrize("pair", PAIRS)
def test_every_element_finds_its_place(pair: str, carrier: str) -> None:
    size, source, target = PAIRS[pair]
    (sentence,) = set(run_world(size, moved, source, target, carrier))
    assert sentence.startswith("p2p: only messages were asked for" if carrier == "p2p" else "peer_memory:")


def fsdp_on_uneven_tp(rank: int) -> list[int]:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("fsdp", "tp"))
    whole = torch.arange(7 * 2, dtype=torch.float32).reshape(7, 2)
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None))
    fully_shard(module, mesh=mesh["fsdp"])
    found = torch.zeros(7, 2) if rank in (0, 4) else None
    ductile.reshard(module, {"weight": found}, timeout_s=20.0)
    assert found is None or torch.equal(found, whole)
    return list(module.weight.to_local().shape)


def test_fsdp_on_tp_where_sizes_do_not_divide() -> None:
    """By the placements as they are written, rank 4 would have the last row; it is rank 5 that has it."""
    assert run_world(6, fsdp_on_uneven_tp) == [[2, 2], [1, 2], [2, 2], [1, 2], [0, 2], [1, 2]]


def scalars_and_whole_tensors(rank: int) -> dict[str, object]:
    """Rank 1 has everything, rank 2 has nothing and wants nothing."""
    source = {
        "step": torch.tensor(7 if rank == 1 else -1) if rank == 1 else None,
        "nested": {"scale": torch.tensor(0.5, dtype=torch.float64) if rank == 1 else None},
        "empty": torch.empty(0, 3),
        "name": "not a tensor",
    }
    if rank == 2:
        report = ductile.reshard(None, None, timeout_s=20.0)
        return {"left_out": report.left_out, "received": report.received_bytes}
    target = {
        "step": torch.tensor(0),
        "nested": {"scale": torch.zeros((), dtype=torch.float64)},
        "empty": torch.empty(0, 3),
        "lr": 0.1,
    }
    report = ductile.reshard(source, target, timeout_s=20.0)
    return {
        "step": target["step"].item(),
        "scale": target["nested"]["scale"].item(),
        "left_out": report.left_out,
        "received": report.received_bytes,
        "table": "12.0" in str(report) or "plan " in str(report),
    }


def test_scalars_nested_names_and_ranks_that_have_nothing() -> None:
    taker, giver, bystander = run_world(3, scalars_and_whole_tensors)
    assert taker == {"step": 7, "scale": 0.5, "left_out": ("lr",), "received": 16, "table": True}
    assert giver == taker | {"received": 0}
    assert bystander == {"left_out": (), "received": 0}


def blocks_by_hand(rank: int) -> list[float]:
    """Rank r has column r of a matrix as a strided view, and wants row r of it."""
    columns = torch.arange(6.0).reshape(2, 3)
    frame = torch.full((2, 5), -1.0)
    frame[:, 2] = columns[:, rank]
    row = torch.zeros(5)
    source = {"m": Block((2, 3), (0, rank), frame[:, 2:3])}
    target = {"m": [Block((2, 3), (rank, 0), row[None, 1:3]), Block((2, 3), (rank, 2), row[None, 4:5])]}
    ductile.reshard(source, target if rank < 2 else None, timeout_s=20.0)
    return row.tolist()


def test_blocks_say_what_no_framework_says() -> None:
    assert run_world(3, blocks_by_hand) == [[0, 0, 1, 0, 2], [0, 3, 4, 0, 5], [0] * 5]


def strips_side_by_side(rank: int) -> list[list[float]]:
    """Parts of columns that lie between each other in one local tensor."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(12.0).reshape(2, 6)
    source = distribute_tensor(whole, mesh, [_StridedShard(1, split_factor=3)], src_data_rank=None)
    target = distribute_tensor(torch.zeros(2, 6), mesh, [_StridedShard(1, split_factor=3)], src_data_rank=None)
    ductile.reshard({"w": source}, {"w": target}, timeout_s=20.0)
    swapped = [Block((2, 6), (0, 2 * k + 1 - rank), target.to_local()[:, k : k + 1]) for k in range(3)]
    ductile.reshard({"w": source}, {"w": swapped}, timeout_s=20.0)
    return target.to_local().tolist()


def test_blocks_may_lie_between_each_other() -> None:
    assert run_world(2, strips_side_by_side) == [[[1, 3, 5], [7, 9, 11]], [[0, 2, 4], [6, 8, 10]]]


def tied(rank: int, as_mapping: bool) -> list[bool]:
    """Two names, one memory: the target is filled under the first, from a source that is tied or not."""

    def model(ranks: tuple[int, ...], tie: bool, fill: float) -> nn.Module | None:
        mesh = DeviceMesh("cpu", ranks)
        if mesh.get_coordinate() is None:
            return None
        module = nn.Module()
        module.embed, module.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        nn.init.constant_(module.embed.weight, fill)
        nn.init.constant_(module.head.weight, fill + 1)
        if tie:
            module.head.weight = module.embed.weight
        return fully_shard(module, mesh=mesh)

    filled: list[bool] = []
    for before, after, expected in ((True, True, (3.0, 3.0)), (False, True, (3.0, 3.0)), (True, False, (3.0, 3.0))):
        old, new = model((0, 1), before, 3.0), model((0, 1, 2), after, -1.0)
        sides = [None if m is None else m.state_dict() if as_mapping else m for m in (old, new)]
        ductile.reshard(*sides, timeout_s=20.0)
        weights = [part.weight.to_local() for part in (new.embed, new.head)]
        filled += [bool(weight.eq(value).all()) for weight, value in zip(weights, expected, strict=True)]
    return filled


@pytest.mark.parametrize("as_mapping", [False, True])
def test_tied_tensors(as_mapping: bool) -> None:
    assert run_world(3, tied, as_mapping) == [[True] * 6] * 3


def again_and_again(rank: int) -> list[object]:
    resharder = ductile.Resharder(timeout_s=20.0)
    mesh = init_device_mesh("cpu", (2,))
    source = torch.zeros(8, 2)
    target = distribute_tensor(torch.zeros(8, 2), mesh, [Shard(1)], src_data_rank=None)
    plans = []
    for step in range(4):
        source.fill_(step)
        report = resharder.reshard({"w": source}, {"w": target})
        assert target.full_tensor().eq(step).all()
        plans.append(report.plan)
    wider = torch.ones(8, 2, dtype=torch.float64)
    last = resharder.reshard({"w": wider}, {"w": torch.zeros(8, 2, dtype=torch.float64)})
    return [len({id(plan) for plan in plans}), last.plan is plans[0]]


def test_a_resharder_plans_once() -> None:
    assert run_world(2, again_and_again) == [[1, False]] * 2


def moved_elsewhere(rank: int) -> list[list[float]]:
    """The same tensors, call after call, but what they are made of changes between the calls."""
    resharder = ductile.Resharder(timeout_s=20.0)
    mesh = init_device_mesh("cpu", (2,))
    source = DTensor.from_local(torch.arange(4.0) + 4 * rank, mesh, [Shard(0)])
    target, seen = torch.zeros(8), []
    for step in range(3):
        old = target.data
        if step == 1:
            target.data = torch.zeros(8)
        if step == 2:
            source._local_tensor = source._local_tensor + 10
            target.data = torch.zeros(16)[::2]
        resharder.reshard({"w": source}, {"w": target})
        seen += [target.tolist(), old.tolist()] if step == 1 else [target.tolist()]
    return seen


def test_a_resharder_notices_that_a_tensor_has_other_memory() -> None:
    first, second = list(range(8)), [value + 10 for value in range(8)]
    assert run_world(2, moved_elsewhere) == [[first, first, first, second]] * 2


def changed_on_one_rank(rank: int, by_hand: bool) -> tuple[list[list[float]], list[int]]:
    resharder = ductile.Resharder(timeout_s=20.0)
    source, target, filled, rounds = torch.zeros(4), torch.zeros(4), [], []
    for step in range(4):
        source.fill_(step)
        if (rank, step) == (1, 2):
            target = torch.zeros(4)
        before = resharder._num_exchanges
        part = Block((4,), (0,), source) if by_hand else source  # a new description of the same memory
        resharder.reshard({"w": part if rank == 0 else None}, {"w": target})
        filled.append(target.tolist())
        rounds.append(resharder._num_exchanges - before)
    return filled, rounds


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_is_the_same_on_all_ranks_is_neither_told_nor_planned_again(by_hand: bool) -> None:
    filled = [[float(step)] * 4 for step in range(4)]
    assert run_world(2, changed_on_one_rank, by_hand) == [(filled, [6, 2, 5, 2])] * 2


def held_tensors(rank: int) -> list[list[bool]]:
    resharder = ductile.Resharder(timeout_s=20.0)
    held, seen = [], []
    for _ in range(3):
        source, target = torch.ones(8), torch.zeros(8)
        held += [weakref.ref(source), weakref.ref(target)]
        resharder.reshard({"w": source if rank else None}, {"w": target})
        del source, target
        gc.collect()
        seen.append([tensor() is not None for tensor in held])
    return seen


def test_a_resharder_holds_the_tensors_of_its_last_call_alone() -> None:
    for rank, seen in enumerate(run_world(2, held_tensors)):
        last = [bool(rank), True]
        assert seen == [last, [False] * 2 + last, [False] * 4 + last]


def many_times(rank: int, carrier: str) -> tuple[list[int], list[int]]:
    num_fds, num_threads = [], []
    for _ in range(30):
        target = torch.zeros(50_000)
        ductile.reshard({"w": torch.ones(50_000) if rank else None}, {"w": target}, timeout_s=20.0, carrier=carrier)
        assert target.eq(1).all()
        num_fds.append(len(os.listdir("/proc/self/fd")))
        num_threads.append(len(os.listdir("/proc/self/task")))
    return num_fds, num_threads


@pytest.mark.parametrize("carrier", ["auto", "p2p"])
def test_calls_leave_nothing_behind(carrier: str) -> None:
    for num_fds, num_threads in run_world(3, many_times, carrier):
        assert max(num_fds[5:]) <= num_fds[5] + 1
        assert max(num_threads[5:]) <= num_threads[5] + 1


def group_of_some(rank: int) -> object:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        with pytest.raises(ValueError, match="is not in the group"):
            ductile.reshard(None, None, group=group)
        return None
    target = torch.zeros(3)
    ductile.reshard({"w": torch.full((3,), 2.5) if rank == 3 else None}, {"w": target}, group=group, timeout_s=20.0)
    return target.tolist()


def test_a_group_of_some_ranks() -> None:
    assert run_world(4, group_of_some) == [None, [2.5] * 3, None, [2.5] * 3]


def among_slots(groups: Groups, members: tuple[int, ...]) -> list[float]:
    place = members.index(dist.get_rank())
    mesh = groups.mesh(mesh_of_slots.Mesh.of(members, dp_shard=len(members)))
    source = DTensor.from_local(torch.tensor([2.0 * place, 2.0 * place + 1]), mesh, [Shard(0)])
    target = torch.zeros(6)
    ductile.reshard({"w": source}, {"w": target}, group=groups.group(members), timeout_s=20.0)
    return target.tolist()


def test_groups_of_ours_whose_default_group_connects_nobody() -> None:
    assert run_ranks(3, among_slots, slots=(501, 7, 30)) == [[0, 1, 2, 3, 4, 5]] * 3


def refused(rank: int, cases: list[str]) -> list[str]:
    """What this rank is told about each case. All of them on one world: a refusal leaves the ranks in step."""
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    memory = torch.arange(8.0)
    linear = nn.Linear(2, 2)
    stray = torch.optim.SGD(linear.parameters(), momentum=0.9)
    states = {
        "missing": ({"a": torch.ones(4)}, {"b": torch.zeros(4)}),
        "dtype": ({"a": torch.ones(4)}, {"a": torch.zeros(4, dtype=torch.bfloat16)}),
        "shape": ({"a": torch.ones(4)}, {"a": torch.zeros(4, 1)}),
        "between ranks": ({"a": torch.ones(4 + rank)}, {"a": torch.zeros(4)}),
        "partial": ({"a": partial}, {"a": torch.zeros(4)}),
        "a hole": ({"a": Block((4,), (rank,), torch.ones(1))}, {"a": torch.zeros(4)}),
        "no module": (stray, None),
        "one rank alone": ({"a": torch.ones(4, device="meta" if rank else "cpu")}, {"a": torch.zeros(4)}),
        "shared memory": ({"a": Block((8,), (4 * rank,), memory[:4])}, {"a": memory}),
        "twice": ([{"a": torch.ones(4)}, {"a": torch.ones(4)}], {"a": torch.zeros(4)}),
    }
    told: list[str] = []
    for case in cases:
        with pytest.raises(NotReshardable) as info:
            ductile.reshard(*states[case], timeout_s=20.0)
        told.append(str(info.value))
    assert memory.tolist() == list(range(8))
    target = torch.zeros(4)
    ductile.reshard({"a": torch.ones(4)}, {"a": target}, timeout_s=20.0)
    assert target.tolist() == [1.0] * 4
    return told


REFUSALS = {
    "missing": "b: the target needs float32 [4], the source has nothing",
    "dtype": "a: the target needs bfloat16 [4], the source has float32 [4]",
    "shape": "a: the target needs float32 [4, 1], the source has float32 [4]",
    "between ranks": "a: in the source, rank 0 has float32 [4] and rank 1 has float32 [5]",
    "partial": "Sum them first, with tensor.redistribute(placements=...), and pass the result (on ranks 0, 1)",
    "a hole": "a: slots (0, 1) need the block from [0] to [4], and the slots of the source do not hold all of it",
    "no module": "an optimizer has a parameter of shape [2, 2] that no module of this state has",
    "one rank alone": "a is on the meta device and has no memory; call module.to_empty(device=...) first (on rank 1)",
    "shared memory": "share memory, and one of them is to be overwritten",
    "twice": "a: in the source, rank 0 lists the block at [0] of size [4] and another one that overlaps it",
}


def test_refusals_are_the_same_on_every_rank_and_touch_nothing() -> None:
    here, there = run_world(2, refused, list(REFUSALS))
    assert here == there
    for text, expected in zip(here, REFUSALS.values(), strict=True):
        assert expected in text
