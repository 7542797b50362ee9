"""Seconds to change the tensor-parallel layout of a live model, against other ways to do it, in one run.

A GPT-like model of 790 MiB in fp32 (12 layers, hidden 1024, 16 and 8 heads, vocabulary 32,000) on 4 processes of this
host. tp is the inner axis, and what tp leaves over is data-parallel replicas.

contender        what it does                                                                          what it checks
  ours           `ductile.Resharder().reshard(old, new)` on DTensors, by default, from the second      all that moves
                 call on: describe, agree, transfer, verdict
  transfer       what the trainer does in its pause: `Transfer`, made ready before, by default         all that moves
  messages       `Transfer` through gloo instead of reads, by default                                  all that moves
  dcp            torch.distributed.checkpoint: save to tmpfs, load                                     nothing
  dtensor        DTensor.full_tensor() of one tensor after the other, then the slice                   nothing
  mcore          megatron-core's `reshard_model_weights` over gloo                                     nothing

`ratio_vs_best_peer` is the fastest of dcp, dtensor and mcore over `ours`: what a user gets by default, verified, over
peers that verify nothing. In tp1->4 no bytes move between ranks: every rank has what it needs, and only copies.

To check means xxh3 over every byte that goes from rank to rank, taken by the one that has it and by the one that gets
it, and compared: by all ranks before `reshard` returns; by the orchestrator after `Transfer`, which is not in its time.

The rules are the same for all: everybody moves the same tensors, from the same memory into the same memory, touched
beforehand: ordinary memory as the trainer allocates it (`ductile.fabric.pages`), in processes that are started as
ductile starts its own. What contenders allocate by themselves is on huge pages, too, where the kernel has them
(`THP_MEM_ALLOC_ENABLE=1`). Plans are made in the first run, which does not count, but for `first call`; then contenders
take turns, as often as fits into the pair's share of the budget. A time is that of the slowest rank, from a barrier to
a barrier. Every contender's result is compared with the expected one, element by element, once.

Memory takes turns with the contenders: what 4 processes copy at once, each from one large buffer of its own to another,
in the same kind of memory. `fraction_of_limit` is the time that the bytes of `ours` would take at that speed, over the
time that it takes, checks included: bytes that stay on a rank are copied once, and so are those that move. Each turn
begins after a short rest: what ran before has left the processes unevenly on the cores.

    python benchmarks/reshard.py      (needs `pip install -e .[bench]`)
"""

import argparse
import gc
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from math import prod
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import torch
import torch.distributed as dist

import ductile
from budget import Budget, CannotGoOn, arguments
from ductile.cluster.node import FREED_MEMORY_STAYS
from ductile.core.layout.geometry.layout import Layout, Tensor
from ductile.core.layout.geometry.mesh import Mesh
from ductile.core.layout.geometry.sharding import Shard, place
from ductile.core.layout.geometry.topology import MIB
from ductile.core.transfer.plan import Plan
from ductile.core.transfer.planning import Planner
from ductile.fabric import heap, pages, rendezvous
from ductile.fabric.choice import choose
from ductile.fabric.exchange import GroupExchange
from ductile.fabric.memory import copy
from ductile.fabric.transfer import Transfer
from peers import reshard as peers
from provenance import provenance, write

RANKS = 4
HIDDEN, INNER, HEADS, KEY_HEADS, VOCABULARY, LAYERS = 1024, 2816, 16, 8, 32_000, 12
PAIRS = {"tp4->2": (4, 2), "tp2->4": (2, 4), "tp4->1": (4, 1), "tp1->4": (1, 4)}
PEERS = {"dcp": peers.checkpoint, "dtensor": peers.gather, "mcore": peers.Refit}
OURS = ("ours", "first call", "transfer", "messages")
VERIFIED = dict.fromkeys(OURS, "all bytes that move, by xxh3 on both sides") | dict.fromkeys(PEERS, "nothing")
COPIED_BYTES = 192 * MIB
"""For the memory's speed, by each process at once."""
REST_S = 0.05
TIMEOUT_S = 120.0

Found = dict[str, Any]
"""What a rank measured of a pair."""
Times = dict[str, list[float]]
Run = Callable[[], object]


def tensors() -> dict[str, tuple[tuple[int, ...], int | None]]:
    """(shape, the dim that tp cuts) by name."""
    head = HIDDEN // HEADS
    layer: dict[str, tuple[tuple[int, ...], int | None]] = {
        "norm": ((HIDDEN,), None),
        "query": ((HEADS * head, HIDDEN), 0),
        "key": ((KEY_HEADS * head, HIDDEN), 0),
        "value": ((KEY_HEADS * head, HIDDEN), 0),
        "out": ((HIDDEN, HEADS * head), 1),
        "mlp_norm": ((HIDDEN,), None),
        "gate": ((INNER, HIDDEN), 0),
        "up": ((INNER, HIDDEN), 0),
        "down": ((HIDDEN, INNER), 1),
    }
    table: dict[str, tuple[tuple[int, ...], int | None]] = {"embed": ((VOCABULARY, HIDDEN), 0)}
    table |= {f"layers.{index}.{name}": entry for index in range(LAYERS) for name, entry in layer.items()}
    return table | {"norm": ((HIDDEN,), None), "head": ((VOCABULARY, HIDDEN), 0)}


def layout(tp: int) -> Layout:
    mesh = Mesh.of(range(RANKS), dp_replicate=RANKS // tp, tp=tp)
    return Layout(
        (
            Tensor(name, "float32", place(shape, mesh, () if dim is None else (Shard("tp", dim),)))
            for name, (shape, dim) in tensors().items()
        ),
        mesh.slots,
    )


def contents(tp: int) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's part of each tensor: every element its own number, modulo what fp32 counts exactly."""
    for index, (name, (shape, dim)) in enumerate(tensors().items()):
        ranges = [torch.arange(length, dtype=torch.int32) for length in shape]
        if dim is not None:
            ranges[dim] = ranges[dim].chunk(tp)[dist.get_rank() % tp]
        numbers = ranges[-1] + 7919 * index
        if len(shape) == 2:
            numbers = ranges[0][:, None] * shape[1] + numbers
        yield name, numbers.bitwise_and_(0xFFFFFF).float()


def local(tp: int, fill: bool) -> dict[str, torch.Tensor]:
    """This rank's tensors, in memory as the trainer has it: `contents`, or zeros."""
    found: dict[str, torch.Tensor] = {}
    for name, (shape, dim) in tensors().items():
        cut = tuple(length // tp if axis == dim else length for axis, length in enumerate(shape))
        found[name] = pages.zeros(prod(cut), torch.float32, "cpu").view(cut)
    if fill:
        for name, numbers in contents(tp):
            found[name].copy_(numbers)
    return found


def measure_pair(tp: tuple[int, int], contenders: list[str], until_s: float, repeats: int, folder: str) -> Found:
    """What this rank measured for one change of layout."""
    before, after = tp
    num_copied, copy_all = memory()  # before the states: the last ones to come may find no huge pages any more
    job = peers.Job(
        local(before, fill=True),
        local(after, fill=False),
        {name: dim for name, (_, dim) in tensors().items()},
        (RANKS // before, before),
        (RANKS // after, after),
        folder,
    )
    layouts = layout(before), layout(after)
    (read_plan, reads), (message_plan, messages) = transfer(True, job, layouts), transfer(False, job, layouts)
    runs: dict[str, Run] = dict(zip(OURS, (*library(job), reads, messages), strict=True))
    runs |= {name: PEERS[name](job) for name in contenders}
    for name, run in runs.items():
        for tensor in job.new.values():
            tensor.zero_()
        dist.barrier()
        run()
        dist.barrier()
        wrong = [tensor for tensor, numbers in contents(after) if not torch.equal(job.new[tensor], numbers)]
        if wrong:
            raise AssertionError(f"{name}: {len(wrong)} tensors are wrong, {wrong[0]} among them")
    copy_all()
    in_turn = runs | {"memory": copy_all}
    times: Times = {name: [] for name in in_turn}
    for number in range(repeats):
        if number and not in_time(until_s):
            break
        for name, run in in_turn.items():
            times[name].append(timed(run))
    found: Found = {
        "times": times,
        "copied_bytes": num_copied,
        "wire_bytes": read_plan.wire_bytes,
        "kept_bytes": sum(read_plan.kept.values()),
        "plans": {
            name: {
                "operations": plan.num_messages,
                "relayed_bytes": plan.relayed_bytes,
                "max_egress_bytes": max(plan.egress.values()),
                "max_ingress_bytes": max(plan.ingress.values()),
                "modelled_s": plan.predicted_s,
            }
            for name, plan in (("reads", read_plan), ("messages", message_plan))
        },
    }
    if "mcore" in runs:
        refit = runs["mcore"]
        assert isinstance(refit, peers.Refit)
        found["mcore_wire"] = refit.wire
    return found


def in_time(until_s: float) -> bool:
    """The first rank's answer, so that all ranks have the same one."""
    answer = torch.tensor(time.monotonic() < until_s)
    dist.broadcast(answer, 0)
    return bool(answer)


def library(job: peers.Job) -> tuple[Run, Run]:
    """As somebody calls it who has DTensors and read docs/library.md: with a `Resharder` that is kept, and without."""
    resharder = ductile.Resharder(timeout_s=TIMEOUT_S)
    old, new = peers.dtensors(job.old, job, job.before), peers.dtensors(job.new, job, job.after)

    def run(once: bool) -> None:
        report = ductile.reshard(old, new, timeout_s=TIMEOUT_S) if once else resharder.reshard(old, new)
        assert report.carrier.startswith("peer_memory"), report.carrier

    return partial(run, False), partial(run, True)


def transfer(one_sided: bool, job: peers.Job, layouts: tuple[Layout, Layout]) -> tuple[Plan, Run]:
    group = dist.group.WORLD
    assert group is not None
    group_exchange = GroupExchange(group, dist.get_rank(), range(RANKS), "cpu", TIMEOUT_S)
    carrier, reason = choose(group_exchange, "cpu", lambda: group, one_sided)
    assert carrier.one_sided == one_sided, reason
    plan = Planner(relays=not one_sided).plan(*layouts)
    return plan, Transfer(plan, dist.get_rank(), job.old, job.new, carrier).run


def timed(run: Run) -> float:
    dist.barrier()
    time.sleep(REST_S)
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def memory() -> tuple[int, Run]:
    """Bytes of all processes together, and what copies them."""
    return RANKS * COPIED_BYTES, partial(copy, *(pages.zeros(COPIED_BYTES, torch.uint8, "cpu") for _ in range(2)))


def rank_main(connection: Connection, rank: int, address: str, options: argparse.Namespace, tmpfs: str) -> None:
    """Sends what it has measured of each pair as soon as it has."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=rendezvous.connect(address, TIMEOUT_S), rank=rank, world_size=RANKS)
    contenders = [peer for peer in PEERS if peer not in missing()]
    end_s = time.monotonic() + options.seconds
    for index, name in enumerate(options.pairs):
        share_s = max(0.0, end_s - time.monotonic()) / (len(options.pairs) - index)
        folder = f"{tmpfs}/{name}"
        found = measure_pair(PAIRS[name], contenders, time.monotonic() + share_s, options.repeats, folder)
        connection.send(found)
        del found
        gc.collect()
        heap.trim()  # what contenders have allocated and freed by themselves: the next pair needs the room
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


def missing() -> list[str]:
    """Peers that are not installed."""
    return [] if find_spec("megatron") else ["mcore"]


def run_ranks(context: ForkServerContext, options: argparse.Namespace, budget: Budget) -> dict[str, list[Found]]:
    """By pair, what every rank measured."""
    store = rendezvous.host_store()
    started, found = [], dict[str, list[Found]]()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="reshard-") as tmpfs:
        for rank in range(RANKS):
            mine, theirs = context.Pipe()
            arguments = (theirs, rank, f"127.0.0.1:{store.port}", options, tmpfs)
            process = context.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            started.append((process, mine))
        for _, pair in budget.turns(options.pairs):
            with budget.turn_of(pair):
                found[pair] = [received(connection, budget.left_s) for _, connection in started]
                print(f"{pair} measured", flush=True)
        for process, _ in started:
            process.join(10.0 if len(found) == len(options.pairs) else 0.0)
            process.kill()
            process.join()
    return found


def received(connection: Connection, left_s: float) -> Found:
    if not connection.poll(left_s):
        raise TimeoutError
    try:
        return connection.recv()
    except EOFError:
        raise CannotGoOn("a rank has ended; what it printed is above") from None


def row_of(pair: str, ranks: list[Found]) -> dict[str, Any]:
    """Medians of the slowest rank's times."""
    first = ranks[0]
    times = {
        name: [max(values) for values in zip(*(rank["times"][name] for rank in ranks), strict=True)]
        for name in first["times"]
    }
    median = {name: statistics.median(values) for name, values in times.items()}
    wire, kept, speed = first["wire_bytes"], first["kept_bytes"], first["copied_bytes"] / median["memory"]
    best = min((name for name in PEERS if name in median), key=lambda name: median[name])
    row: dict[str, Any] = {"pair": pair}
    row |= {f"{name.replace(' ', '_')}_s": median[name] for name in (*OURS, *PEERS) if name in median}
    row |= {
        "best_peer": best,
        "ratio_vs_best_peer": median[best] / median["ours"],
        "first_call_ratio_vs_best_peer": median[best] / median["first call"],
        "transfer_ratio_vs_best_peer": median[best] / median["transfer"],
        "messages_ratio_vs_best_peer": median[best] / median["messages"],
        "fraction_of_limit": (wire + kept) / speed / median["ours"],
        "transfer_fraction_of_limit": (wire + kept) / speed / median["transfer"],
        "memory_bytes_s": speed,
        "wire_bytes": wire,
        "kept_bytes": kept,
        "repeats": len(times["ours"]),
        "min_s": {name: min(values) for name, values in times.items()},
        "max_s": {name: max(values) for name, values in times.items()},
        "plans": first["plans"],
    }
    if "mcore_wire" in first:
        row["mcore_operations"] = sum(rank["mcore_wire"][0] for rank in ranks)
        row["mcore_wire_bytes"] = sum(rank["mcore_wire"][1] for rank in ranks)
    return row


def show(rows: list[dict[str, Any]]) -> None:
    print("\nWeights, 790 MiB; seconds, medians. All of ours is verified; the peers verify nothing.")
    heads = ("ours", "1st call", "transfer", "messages", *PEERS)
    print(f"{'':8}" + "".join(f"{head:>10}" for head in heads) + f"{'x peer':>8}{'of limit':>10}{'GB/s':>6}   moves")
    for row in rows:
        columns = [f"{name.replace(' ', '_')}_s" for name in (*OURS, *PEERS)]
        cells = "".join(f"{row[name]:10.3f}" if name in row else f"{'-':>10}" for name in columns)
        rest = f"{row['ratio_vs_best_peer']:8.2f}{row['fraction_of_limit']:10.2f}{row['memory_bytes_s'] / 1e9:6.1f}"
        print(f"{row['pair']:8}{cells}{rest}   {row['wire_bytes'] / MIB:.0f} MiB")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="at most")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    options = parser.parse_args()
    budget = Budget(options.budget)
    options.seconds = budget.left_s
    for peer in missing():
        budget.leave_out(peer, "megatron-core is not installed (pip install -e .[bench])")
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # torch reads it when a process allocates for the first time
    os.environ |= FREED_MEMORY_STAYS  # read when a process starts
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "torch.distributed.tensor"])
    rows = [row_of(pair, ranks) for pair, ranks in run_ranks(context, options, budget).items()]
    show(rows)
    packages = ("torch", "numpy", *(() if missing() else ("megatron-core",)))
    write(options.json, {**provenance(*packages), "verified": VERIFIED, "pairs": rows, **budget.told}, indent=1)


if __name__ == "__main__":
    main()
