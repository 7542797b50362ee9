"""A world as somebody else's trainer has it: `init_process_group`, and a default group that everybody talks through."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ductile.fabric import rendezvous
from tests.ranks import result_of, start, stop

LEAVE_WITHIN_S = 60.0


def run_world(size: int, function: Callable[..., Any], *arguments: Any, mourned: tuple[int, ...] = ()) -> list[Any]:
    """`function(rank, *arguments)` on ranks 0 to `size` - 1; their results. Those of `mourned` will die or stop."""
    store = rendezvous.host_store()
    num_leaving = size - len(mourned)
    started = [start(_in_world, rank, size, num_leaving, store.port, function, arguments) for rank in range(size)]
    try:
        return [
            None if rank in mourned else result_of(connection, f"rank {rank}")
            for rank, (_, connection) in enumerate(started)
        ]
    finally:
        for rank in mourned:
            started[rank][0].kill()  # it may only have been stopped
        stop(*(process for process, _ in started))


def _in_world(
    rank: int, size: int, num_leaving: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = rendezvous.connect(f"{rendezvous.LOOPBACK}:{port}", 30.0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    dist.barrier()  # who leaves before all have connected breaks the others' start
    try:
        return function(rank, *arguments)
    finally:
        _wait_for_the_others(store, num_leaving)
        dist.destroy_process_group()


def _wait_for_the_others(store: dist.Store, num_leaving: int) -> None:
    """Who leaves while another still waits for a dead rank would be taken for the dead one."""
    deadline = time.monotonic() + LEAVE_WITHIN_S
    num_there = store.add("leaving", 1)
    while num_there < num_leaving and time.monotonic() < deadline:
        time.sleep(0.01)
        num_there = store.add("leaving", 0)
