"""`ductile.reshard` between four processes that share the device.

A state of 1 GiB in DTensors: rows over four ranks, then columns over four, then rows over two. The default group is
gloo, as NCCL has no two ranks on one device; the bytes travel by what `ductile.reshard` chooses, which it says. The
first call of a pair plans; the time is that of later ones, from a barrier to a barrier, of the slowest rank. Every
element is compared with what it should be.
"""

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from gpu_parts.part import Setting

RANKS = 4
DEADLINE_S = 35.0
LAYOUTS = {
    "rows over 4": (range(4), 0),
    "columns over 4": (range(4), 1),
    "rows over 2": (range(2), 0),
}
"""Ranks, and the dim that they share."""
PAIRS = (("rows over 4", "columns over 4"), ("rows over 4", "rows over 2"), ("rows over 2", "rows over 4"))


def run(setting: Setting) -> dict[str, Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "ductile.resharding.reshard"])
    found = of_all_ranks(context, setting)
    pairs: dict[str, Any] = {}
    for pair, first in found[0].items():
        each = [rank[pair]["seconds"] for rank in found]
        seconds = statistics.median(max(of_ranks) for of_ranks in zip(*each, strict=True))
        pairs[pair] = {
            "seconds": seconds,
            "first_call_s": max(rank[pair]["first_call_s"] for rank in found),
            "moved_bytes": first["moved_bytes"],
            "gb_per_s": first["moved_bytes"] / seconds / 1e9,
            "carrier": first["carrier"],
        }
    told = "; ".join(f"{pair} {of['seconds'] * 1000:.0f} ms" for pair, of in pairs.items())
    return {"pairs": pairs, "sentence": f"{told}, by {next(iter(pairs.values()))['carrier'].partition(':')[0]}"}


def of_all_ranks(context: Any, setting: Setting) -> list[dict[str, dict[str, Any]]]:
    from ductile.fabric import rendezvous

    store = rendezvous.host_store()
    started = []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        arguments = (theirs, rank, f"{rendezvous.LOOPBACK}:{store.port}", setting)
        process = context.Process(target=rank_main, args=arguments, daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    found, deadline_s = [], time.monotonic() + DEADLINE_S
    for rank, (_, connection) in enumerate(started):
        if not connection.poll(max(0.0, deadline_s - time.monotonic())):
            raise TimeoutError(f"rank {rank} did not reply within {DEADLINE_S:g} s")
        try:
            found.append(connection.recv())
        except EOFError:
            raise RuntimeError(f"rank {rank} ended; its traceback is above") from None
    for process, _ in started:
        process.join(5.0)
    return found


def rank_main(connection: Connection, rank: int, address: str, setting: Setting) -> None:
    import os

    import torch
    import torch.distributed as dist

    from ductile.fabric import rendezvous

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if setting.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=rendezvous.connect(address, 30.0), rank=rank, world_size=RANKS)
    try:
        # Of gloo, whatever a mesh would make for its kind of device.
        groups = {layout: dist.new_group(list(ranks), backend="gloo") for layout, (ranks, _) in LAYOUTS.items()}
        connection.send({f"{a} to {b}": measure(rank, a, b, setting, groups) for a, b in PAIRS})
    finally:
        dist.destroy_process_group()


def measure(rank: int, before: str, after: str, setting: Setting, groups: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from ductile.resharding.reshard import Resharder

    size, count, rounds = (64, 2, 2) if setting.small else (4096, 16, 5)
    old = state(rank, before, groups[before], size, count, setting, fill=True)
    new = state(rank, after, groups[after], size, count, setting, fill=False)
    resharder, seconds = Resharder(timeout_s=20.0), []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        report = resharder.reshard(old, new)
        if setting.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    expected = state(rank, after, groups[after], size, count, setting, fill=True)
    for name, tensor in (new or {}).items():
        if not torch.equal(tensor.to_local(), expected[name].to_local()):
            raise RuntimeError(f"{before} to {after}: rank {rank} has something else than it should in {name}")
    return {
        "first_call_s": seconds[0],
        "seconds": seconds[1:],
        "moved_bytes": report.plan.wire_bytes,
        "carrier": report.carrier,
    }


def state(
    rank: int, layout: str, group: Any, size: int, count: int, setting: Setting, fill: bool
) -> dict[str, Any] | None:
    """[size, size] tensors whose elements say where they are; zeros without `fill`. None outside the layout."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    ranks, dim = LAYOUTS[layout]
    if rank not in ranks:
        return None
    mesh = DeviceMesh.from_group(group, setting.device, mesh=list(ranks))
    shape, chunk = [size, size], size // len(ranks)
    shape[dim] = chunk
    found: dict[str, Any] = {}
    for number in range(count):
        local = torch.zeros(shape, device=setting.device)
        if fill:
            rows, columns = (torch.arange(length, device=setting.device, dtype=torch.float32) for length in shape)
            here = [rows, columns]
            here[dim] = here[dim] + ranks.index(rank) * chunk
            local.copy_(here[0][:, None] * 3 + here[1][None, :] * 7 + number)
        found[f"tensor.{number}"] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
    return found
