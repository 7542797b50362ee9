"""What ductile uses of torch that is not documented. A torch that lacks one of these fails here, with its name, before
anything stranger happens. All are in torch 2.11 (`DeviceMesh._pg_registry` is new in it) and in 2.13."""

import inspect

import pytest
import torch
from torch._C import _distributed_c10d
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import debug, placement_types

USED = [
    (_distributed_c10d, "HashStore", "fabric.universe: a group that connects nobody"),
    (distributed_c10d, "_get_default_group", "parallel.reshard: among everybody, unless told otherwise"),
    (distributed_c10d, "_new_process_group_helper", "fabric.groups: a group among its members alone"),
    (distributed_c10d, "_set_pg_timeout", "fabric.groups"),
    (distributed_c10d, "_world", "fabric.groups: a group's slots, by rank"),
    (distributed_c10d, "GroupName", "fabric.groups"),
    (_distributed_c10d.ProcessGroup, "_device_types", "parallel.reshard: does the group carry CUDA tensors?"),
    (debug, "_clear_sharding_prop_cache", "fabric.groups: what torch remembers of a mesh goes with it"),
    (placement_types, "_StridedShard", "parallel.blocks: FSDP2 on tensor parallelism"),
    (torch.UntypedStorage, "_share_cuda_", "fabric.cuda_ipc"),
    (torch.UntypedStorage, "_new_shared_cuda", "fabric.cuda_ipc"),
    (FSDPModule, "set_force_sum_reduction_for_comms", "parallel.data: gloo has no scaled sum"),
    (FileSystemWriter, "write_data", "parallel.state"),
    (torch.ops.aten, "_softmax_backward_data", "model.cpu_attention"),
]


@pytest.mark.parametrize(("owner", "name", "used_by"), USED, ids=[name for _, name, _ in USED])
def test_it_is_there(owner: object, name: str, used_by: str) -> None:
    assert hasattr(owner, name), f"torch {torch.__version__} has no {name}, which is for {used_by}"


def test_a_group_is_made_with_these_arguments() -> None:
    known = inspect.signature(distributed_c10d._new_process_group_helper).parameters
    ours = {"group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name", "timeout"}
    assert ours | {"device_id"} <= known.keys()
    assert isinstance(distributed_c10d._world.pg_group_ranks, dict)


def test_a_mesh_keeps_its_groups_where_they_can_be_let_go() -> None:
    assert "_pg_registry" in inspect.getsource(device_mesh.DeviceMesh.__init__)
