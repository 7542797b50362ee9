"""What ductile uses of torch that is not documented. A torch that lacks one of these fails here, with its name, before
anything stranger happens. All are in torch 2.11 (`DeviceMesh._pg_registry` is new in it) and in 2.13."""

import inspect

import pytest
import torch
import torch._dynamo
from torch._C import _distributed_c10d
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_common, _fsdp_param_group, _fsdp_state, _fully_shard
from torch.distributed.pipelining import _utils, stage
from torch.distributed.tensor import debug, placement_types

from ductile.parallel.fsdp_collectives import DirectAllGather, DirectReduceScatter

USED = [
    (_distributed_c10d, "HashStore", "fabric.universe: a group that connects nobody"),
    (distributed_c10d, "_get_default_group", "parallel.reshard: among everybody, unless told otherwise"),
    (distributed_c10d, "_new_process_group_helper", "fabric.groups: a group among its members alone"),
    (distributed_c10d, "_abort_process_group", "fabric.groups: a group of NCCL's, without waiting for its members"),
    (_distributed_c10d.ProcessGroupGloo, "_set_default_timeout", "fabric.groups"),
    (_distributed_c10d._ProcessGroupWrapper, "wrapped_pg", "fabric.groups: what TORCH_DISTRIBUTED_DEBUG=DETAIL wraps"),
    (distributed_c10d, "_world", "fabric.groups: a group's slots, by rank"),
    (distributed_c10d, "GroupName", "fabric.groups"),
    (_distributed_c10d.ProcessGroup, "_device_types", "parallel.reshard: does the group carry CUDA tensors?"),
    (_distributed_c10d.ProcessGroup, "_get_backend", "fabric.p2p: is it gloo that carries CUDA tensors?"),
    (_distributed_c10d.Backend.Options, "_timeout", "fabric.groups: what `set_timeout` has set"),
    (debug, "_clear_sharding_prop_cache", "fabric.groups: what torch remembers of a mesh goes with it"),
    (placement_types, "_StridedShard", "parallel.blocks: FSDP2 on tensor parallelism"),
    (_distributed_c10d.Backend, "name", "fabric.p2p: is it gloo that carries CUDA tensors?"),
    (torch.UntypedStorage, "_share_cuda_", "fabric.cuda_ipc"),
    (torch.UntypedStorage, "_new_shared_cuda", "fabric.cuda_ipc"),
    (FSDPModule, "set_force_sum_reduction_for_comms", "parallel.data: gloo has no scaled sum"),
    (FSDPModule, "set_custom_all_gather", "parallel.data: parallel.exchange on CPUs"),
    (FSDPModule, "set_custom_reduce_scatter", "parallel.data: parallel.exchange on CPUs"),
    (_fsdp_api, "AllGather", "parallel.exchange"),
    (
        _fully_shard.fully_shard,
        "state",
        "parallel.torch_pipelining: gradients that were held back, as torch's pipelines do it; parallel.fsdp_state",
    ),
    (_fsdp_common, "_from_local_no_grad", "parallel.fsdp_state: a DTensor's part may lie in host memory"),
    (_fsdp_state.FSDPStateContext(), "all_states", "parallel.torch_pipelining"),
    (_fsdp_state.FSDPState, "_root_post_backward_final_callback", "parallel.torch_pipelining"),
    (_fsdp_param_group.FSDPParamGroup, "post_backward", "parallel.torch_pipelining"),
    (stage, "_RecvInfo", "parallel.torch_pipelining: memory for what comes from a neighbour"),
    (_fsdp_api, "ReduceScatter", "parallel.exchange"),
    (FileSystemWriter, "write_data", "parallel.state"),
    (torch._C._autograd._KinetoEvent, "start_ns", "slot.trace: what a trace has"),
    (torch._C._autograd._KinetoEvent, "end_ns", "slot.trace"),
    (torch._C._autograd._KinetoEvent, "device_type", "slot.trace"),
    (torch.cuda.memory, "_record_memory_history", "kernels.memory_history"),
    (torch.cuda.memory, "_dump_snapshot", "kernels.memory_history"),
    (torch._dynamo, "lookup_backend", "parallel.compilation: torch's backend behind ours, which counts"),
    (torch._dynamo.exc, "RestartAnalysis", "parallel.compilation: no failure of a backend's"),
    (torch._dynamo.config, "recompile_limit", "parallel.compilation"),
    (torch._guards.CompileContext, "current_compile_id", "parallel.compilation: what is compiled again"),
    (torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", "kernels.cpu_attention"),
    (torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", "kernels.cpu_attention"),
    (torch.ops.mkldnn, "_linear_pointwise", "kernels.products"),
    (torch.ops.aten.silu, "out", "kernels.swiglu"),
    (torch.ops.aten.silu_backward, "grad_input", "kernels.swiglu"),
    (torch.ops.aten.silu, "out", "kernels.swiglu"),
    (torch.ops.aten.silu_backward, "grad_input", "kernels.swiglu"),
]


@pytest.mark.parametrize(("owner", "name", "used_by"), USED, ids=[name for _, name, _ in USED])
def test_it_is_there(owner: object, name: str, used_by: str) -> None:
    assert hasattr(owner, name), f"torch {torch.__version__} has no {name}, which is for {used_by}"


def test_a_group_is_made_with_these_arguments() -> None:
    known = inspect.signature(distributed_c10d._new_process_group_helper).parameters
    ours = {"group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name", "timeout"}
    assert ours | {"device_id"} <= known.keys()
    assert isinstance(distributed_c10d._world.pg_group_ranks, dict)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(_fsdp_api.AllGather, DirectAllGather), (_fsdp_api.ReduceScatter, DirectReduceScatter)],
    ids=["all-gather", "reduce-scatter"],
)
def test_fsdp2_calls_its_collectives_with_these_arguments(theirs: type, ours: type) -> None:
    """All of torch's arguments are named alike in ours, and ours are all of torch's."""
    assert theirs.__abstractmethods__ == {"allocate", "__call__"}
    for name in theirs.__abstractmethods__:
        expected, found = (inspect.signature(getattr(one, name)).parameters for one in (theirs, ours))
        assert list(found) == list(expected), name
        assert [each.kind for each in found.values()] == [each.kind for each in expected.values()], name
    setters = (FSDPModule.set_custom_all_gather, FSDPModule.set_custom_reduce_scatter)
    assert [list(inspect.signature(setter).parameters) for setter in setters] == [["self", "comm"]] * 2


def test_a_frontend_of_torch_s_pipelines_has_these_to_say() -> None:
    """A stage whose micro-batches have each their own size is one of these; the methods that it takes over, and what
    they set, are torch's."""
    abstract = {"_prepare_forward_infra", "_prepare_backward_infra", "_create_grad_recv_info"}
    assert abstract - {"_prepare_backward_infra"} <= stage._PipelineStageBase.__abstractmethods__ <= abstract
    for name in (
        *abstract,
        "get_fwd_recv_ops",
        "get_bwd_recv_ops",
        "backward_one_chunk",
        "_retrieve_recv_activations",
        "_get_init_p2p_neighbors_ops",
    ):
        assert callable(getattr(stage._PipelineStageBase, name)), name
    source = inspect.getsource(stage._PipelineStageBase)
    described = ["_runtime_validate", "_stage_meta"] if hasattr(_utils, "_TensorMeta") else []
    for name in ("args_recv_info", "grad_recv_info", "act_send_info", "grad_send_info", "chunks", *described):
        assert f"self.{name}" in source, name


def test_a_buffer_of_torch_s_pipelines_is_made_with_these_arguments() -> None:
    known = list(inspect.signature(stage._RecvInfo).parameters)
    assert known[:3] == ["input_name", "source", "buffer"]
    assert (known[3:4] == ["tensor_meta"]) == hasattr(_utils, "_TensorMeta")


def test_a_part_is_sent_with_a_rank_and_a_tag() -> None:
    """These are not Python's, so their signature is the first line of what they say of themselves."""
    for name, rank in (("send", "dstRank"), ("recv", "srcRank")):
        said = getattr(_distributed_c10d.ProcessGroup, name).__doc__ or ""
        assert f"{rank}: " in said, name
        assert "tag: " in said, name


def test_a_mesh_keeps_its_groups_where_they_can_be_let_go() -> None:
    assert "_pg_registry" in inspect.getsource(device_mesh.DeviceMesh.__init__)
