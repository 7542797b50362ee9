"""The null universe: a default process group that every slot is in and none can talk through.

torch numbers ranks by the default group: `DeviceMesh`, FSDP2 and DTensor take their coordinates from it. Here a
process's rank is its slot id and the world is as large as a run can ever get, so both stay valid whichever slot comes
and goes. Nothing connects: entering takes about a millisecond, and no other process needs to exist. Every collective on
it raises, because a forgotten `group=` must fail at once instead of waiting for slots that are not there.

Real groups come from `ductile.fabric.groups`.
"""

from datetime import timedelta
from threading import Lock
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

MAX_SLOTS = 1 << 14
_entering = Lock()
_BACKEND = "null"


class StrayCollective(RuntimeError):
    """A collective was called without the group that it is for."""


class NullGroup(dist.ProcessGroup):
    """Refuses every operation."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StrayCollective(
            "a collective was called on the default process group, which connects no ranks; pass group= with one of "
            "ductile.fabric.groups"
        )

    allgather = allgather_coalesced = allgather_into_tensor_coalesced = _allgather_base = _refuse
    allreduce = allreduce_coalesced = reduce = broadcast = gather = scatter = barrier = monitored_barrier = _refuse
    reduce_scatter = reduce_scatter_tensor_coalesced = _reduce_scatter_base = _refuse
    all_gather_single = all_gather_single_coalesced = all_to_all_single = _refuse
    reduce_scatter_single = reduce_scatter_single_coalesced = _refuse
    alltoall = alltoall_base = send = recv = recv_anysource = merge_remote_group = split_group = _refuse


def enter(slot: int) -> None:
    """Make this process rank `slot` of the null universe. Entering again as the same slot changes nothing.

    Raises RuntimeError when the process has another default group, or entered as another slot.
    """
    if not 0 <= slot < MAX_SLOTS:
        raise ValueError(f"slot {slot} is outside 0 to {MAX_SLOTS - 1}")
    with _entering:
        _enter(slot)


def _enter(slot: int) -> None:
    if dist.is_initialized():
        if dist.get_backend() != _BACKEND or dist.get_rank() != slot:
            raise RuntimeError(
                f"this process already is rank {dist.get_rank()} of a {dist.get_backend()} world; it cannot become "
                f"slot {slot} as well"
            )
        return
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _create, devices=["cpu", "cuda"])
    # No other process reads the store, and nothing waits for the timeout.
    dist.init_process_group(_BACKEND, store=HashStore(), rank=slot, world_size=MAX_SLOTS, timeout=timedelta(seconds=60))


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> NullGroup:
    return NullGroup(rank, size)  # pyright: ignore[reportCallIssue] (the stub knows only the constructor with a store)
