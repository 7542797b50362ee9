"""FSDP2's two collectives between processes on CPUs, which sequence parallelism takes too: what each rank needs comes
straight from the others.

gloo's all-gather receives into memory of its own and copies from there. Its reduce-scatter is an all-reduce of
everything, on a copy, of which a rank keeps its part. Here every pair of ranks exchanges what one needs of the other,
once, into the place where it stays or is added up. A gradient's terms are added in the order of the ranks, so that it
does not depend on who came first.

R ranks, S elements of one rank's part.
"""

from collections.abc import Sequence
from datetime import timedelta
from time import monotonic

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ductile.fabric.groups import timeout_of
from ductile.parallel.host_memory import mark_host

LEAST_S = 0.001
"""Least wait for a message: torch counts a timeout in whole milliseconds, and takes 0 for the group's own."""


class FreshMemory:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Fresh memory for one collective; FSDP2 asks for it."""
        return torch.empty(tuple(map(int, size)), dtype=dtype, device=device)


class DirectAllGather(FreshMemory, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """`input_tensor` [S], this rank's part, may lie in `output_tensor` [R S] already. Returns when all is there."""
        parts, own = output_tensor.chunk(group.size()), group.rank()
        if input_tensor.data_ptr() != parts[own].data_ptr():
            parts[own].copy_(input_tensor)
        exchange([input_tensor] * len(parts), parts, group)


class DirectReduceScatter(FreshMemory, ReduceScatter):
    def __init__(self, to_host: bool = False) -> None:
        """to_host: what is summed goes to host memory (`trainer.model.fsdp_cpu_offload`), as FSDP2 would copy it there
        from a GPU. Here it is there already, and is only marked."""
        super().__init__()
        self._to_host = to_host

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """`output_tensor` [S] becomes this rank's part of the sum of all ranks' `input_tensor` [R S].

        R is at least 2: FSDP2 asks nothing of a rank that is alone."""
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"ranks on CPUs add their gradients up; {op} was asked for")
        parts, own = input_tensor.chunk(group.size()), group.rank()
        addends = [part if rank == own else torch.empty_like(output_tensor) for rank, part in enumerate(parts)]
        exchange(parts, addends, group)
        first, second, *others = addends
        torch.add(first, second, out=output_tensor)
        for term in others:
            output_tensor.add_(term)
        if self._to_host:
            mark_host(output_tensor)


def exchange(leaving: Sequence[Tensor], coming: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send `leaving[rank]` to each other rank of the group, and fill `coming[rank]` with what that one sends.

    Collective. Returns when both are through; raises RuntimeError when a rank has died, or when not all are through
    after the group's timeout.
    """
    # The group's timeout as it is now: by itself, a message of gloo's keeps the one that the group was made with.
    deadline = monotonic() + timeout_of(group).total_seconds()
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    under_way = [group.recv([coming[rank]], rank, 0) for rank in others]
    under_way += [group.send([leaving[rank]], rank, 0) for rank in others]
    for work in under_way:
        work.wait(timedelta(seconds=max(LEAST_S, deadline - monotonic())))
