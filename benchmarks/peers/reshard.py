"""Other ways to change a tensor-parallel layout in place of ductile's: checkpoint, gather, and Megatron's refit.

Each takes tensors of the old layout and preallocated ones of the new layout, prepares whatever it can keep between
runs, and returns a function that moves the state once. Everything it allocates in that function is its own affair.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

Run = Callable[[], None]


@dataclass(frozen=True)
class Job:
    """One rank's part of a change from (dp, tp) to (dp, tp) on the default group; tp is the inner axis."""

    old: dict[str, torch.Tensor]
    new: dict[str, torch.Tensor]
    dims: dict[str, int | None]
    """The dim that tp cuts, by tensor."""
    before: tuple[int, int]
    after: tuple[int, int]
    folder: str
    """On tmpfs, the same for all ranks, and this job's own."""


def checkpoint(job: Job) -> Run:
    """DCP through tmpfs: save, load into the new tensors. No fsync, plans cached, one file a rank."""
    saved, loaded = dtensors(job.old, job, job.before), dtensors(job.new, job, job.after)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")

    def run() -> None:
        writer = dcp.FileSystemWriter(job.folder, single_file_per_rank=True, sync_files=False, overwrite=True)
        dcp.save(saved, storage_writer=writer, planner=planner)
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(job.folder))

    return run


def gather(job: Job) -> Run:
    """DTensor: the full tensor on every rank, one tensor at a time, then the slice that is wanted."""
    tensors = dtensors(job.old, job, job.before)
    size, at = job.after[1], dist.get_rank() % job.after[1]

    def run() -> None:
        for name, tensor in tensors.items():
            full, dim = tensor.full_tensor(), job.dims[name]
            job.new[name].copy_(full if dim is None else full.chunk(size, dim)[at])

    return run


def dtensors(tensors: dict[str, torch.Tensor], job: Job, sizes: tuple[int, int]) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    return {name: _dtensor(tensor, job.dims[name], mesh) for name, tensor in tensors.items()}


def _dtensor(tensor: torch.Tensor, dim: int | None, mesh: DeviceMesh) -> DTensor:
    placements = [Replicate(), Replicate() if dim is None else Shard(dim)]
    return DTensor.from_local(tensor, mesh, placements, run_check=False)


class Refit:
    """megatron-core's `reshard_model_weights` over gloo. Its plan is made in the first run and kept in the module."""

    def __init__(self, job: Job) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it misses extensions for GPUs
            from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
            from megatron.core.resharding.refit import reshard_model_weights

        class Service(GlooCopyService):
            def __init__(self) -> None:  # the original makes a CUDA stream
                self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
                self.gloo_pg = dist.group.WORLD
                self.send_ops, self.recv_ops = [], []
                self._copy_stream = None

        self._refit, self._service = reshard_model_weights, Service()
        self._source, self._target = _module(job.old, job, job.before), _module(job.new, job, job.after)

    def __call__(self) -> None:
        self._refit(self._source, self._target, self._service)

    @property
    def wire(self) -> tuple[int, int]:
        """(operations, bytes) that this rank receives from others."""
        received = [op for op in self._target._cached_reshard_plan.recv_ops if op.peer_rank != dist.get_rank()]
        tensors = dict(self._target.named_parameters())
        return len(received), sum(tensors[op.param_name][op.my_slice].nbytes for op in received)


def _module(tensors: dict[str, torch.Tensor], job: Job, sizes: tuple[int, int]) -> torch.nn.Module:
    module = torch.nn.Module()
    module.config = SimpleNamespace(num_moe_experts=None)
    module.pg_collection = SimpleNamespace(**_groups(*sizes), pp=None, ep=None)
    for name, tensor in tensors.items():
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        if job.dims[name] is not None:
            parameter.tensor_model_parallel, parameter.partition_dim = True, job.dims[name]
            parameter.partition_stride = 1
        module.register_parameter(name.replace(".", "/"), parameter)
    return module


def _groups(dp: int, tp: int) -> dict[str, dist.ProcessGroup]:
    """All ranks make all groups, in the same order."""
    mine: dict[str, dist.ProcessGroup] = {}
    tensor_parallel = [list(range(first, first + tp)) for first in range(0, dp * tp, tp)]
    data_parallel = [list(range(first, dp * tp, tp)) for first in range(tp)]
    for name, sets in (("tp", tensor_parallel), ("dp", data_parallel)):
        for ranks in sets:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine[name] = group
    return mine
