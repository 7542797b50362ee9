"""Which library carries a group's collectives follows from its members' devices, which they tell each other."""

import pytest
import torch
import torch.distributed as dist

from ductile.fabric.backend import Backend, choose_backend, tell_devices, why_not_beside
from ductile.fabric.groups import Groups
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("device_type", "devices", "name", "shared"),
    [
        ("cpu", ["a", "a", "a"], "gloo", ()),
        ("cuda", ["a"], "nccl", ()),
        ("cuda", ["a", "b", "c"], "nccl", ()),
        ("cuda", ["a", "a"], "gloo", (0, 1)),
        ("cuda", ["a", "b", "b", "a"], "gloo", (1, 2)),
        ("cuda", ["a", "b", "a", "b"], "gloo", (0, 2)),
    ],
)
def test_nccl_takes_one_rank_a_gpu(device_type: str, devices: list[str], name: str, shared: tuple[int, ...]) -> None:
    found = choose_backend(device_type, devices)
    assert found.name == name
    if shared:
        assert found.stands_in.startswith(f"ranks {shared[0]} and {shared[1]} share a GPU, and NCCL takes one rank")
    else:
        assert found == Backend(name)


@pytest.mark.parametrize(
    ("device_type", "devices", "beside"),
    [("cpu", set(), True), ("cuda", {"a"}, True), ("cuda", {"a", "b"}, False), ("cuda", {"a", "b", "c"}, False)],
)
def test_nccl_makes_no_groups_beside_its_collectives(device_type: str, devices: set[str], beside: bool) -> None:
    said = why_not_beside(device_type, devices)
    assert said == ("" if beside else "NCCL's groups are not made beside its collectives")


def told(groups: Groups, members: tuple[int, ...]) -> list[str]:
    slot = dist.get_rank()
    return tell_devices(groups._store, "a/", slot, members, f"GPU of slot {slot}")


def test_members_tell_each_other_their_devices_in_rank_order() -> None:
    assert run_ranks(3, told, slots=(5, 1, 9)) == [["GPU of slot 5", "GPU of slot 1", "GPU of slot 9"]] * 3


def collectives_on_one_gpu(groups: Groups, members: tuple[int, ...]) -> dict[str, list[float]]:
    """What a trainer asks for, by the backend that slots on one GPU get."""
    on_gpu = Groups(dist.get_rank(), 1, "cuda:0", groups._store, 20.0)
    group = on_gpu.group(members)
    assert group._get_backend(torch.device("cuda")).name() == "gloo"
    assert on_gpu.num_on_device(members) == len(members)
    rank, size = dist.get_rank(group), len(members)
    found: dict[str, torch.Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        mine = torch.full((2,), rank, dtype=dtype, device="cuda:0")
        found[f"all_gather {dtype}"] = torch.empty(2 * size, dtype=dtype, device="cuda:0")
        dist.all_gather_into_tensor(found[f"all_gather {dtype}"], mine, group=group)
        found[f"reduce_scatter {dtype}"] = torch.empty(1, dtype=dtype, device="cuda:0")
        dist.reduce_scatter_tensor(
            found[f"reduce_scatter {dtype}"], torch.arange(size, dtype=dtype, device="cuda:0"), group=group
        )
    found["all_reduce"] = torch.tensor([rank + 0.5], dtype=torch.float64, device="cuda:0")
    dist.all_reduce(found["all_reduce"], group=group)
    found["broadcast"] = torch.tensor([float(rank)], device="cuda:0")
    dist.broadcast(found["broadcast"], members[1], group=group)
    results = {name: tensor.tolist() for name, tensor in found.items()}
    on_gpu.destroy()
    return results


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [2, 3])
def test_slots_on_one_gpu_have_the_collectives_of_a_trainer(size: int) -> None:
    for rank, found in enumerate(run_ranks(size, collectives_on_one_gpu)):
        for dtype in (torch.float32, torch.bfloat16):
            assert found[f"all_gather {dtype}"] == [float(other) for other in range(size) for _ in range(2)]
            assert found[f"reduce_scatter {dtype}"] == [float(rank * size)]
        assert found["all_reduce"] == [sum(range(size)) + 0.5 * size]
        assert found["broadcast"] == [1.0]
