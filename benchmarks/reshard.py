"""Seconds to change the tensor-parallel layout of a live model, against other ways to do it, in one run.

A GPT-like model of 790 MiB in fp32 (12 layers, hidden 1024, 16 and 8 heads, vocabulary 32,000) on 4 processes of this
host. tp is the inner axis, and what tp leaves over is data-parallel replicas.

contender        what it does                                                                          what it checks
  ours           `ductile.Resharder().reshard(old, new)` on DTensors, by default, from the second      all that moves
                 call on: describe, agree, transfer, verdict
  transfer       what the trainer does in its pause: `Transfer`, made ready before, by default         all that moves
  - unverified   the same with verify="off", which neither the trainer nor `reshard` does by default   nothing
  messages       `Transfer` through gloo instead of reads, by default                                  all that moves
  - unverified   the same with verify="off"                                                            nothing
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
(`THP_MEM_ALLOC_ENABLE=1`). Plans are made in the first run, which does not count, but for `first call`; contenders
take turns. A time is that of the slowest rank, from a barrier to a barrier. Every contender's result is compared with
the expected one, element by element, once. The second table moves the two moments of Adam as well, which DCP and
DTensor can do too.

Two limits take turns with the contenders. Memory: what 4 processes copy at once, each from one large buffer of its own
to another, in the same kind of memory. Loopback: what they send each other at once through gloo. `fraction_of_limit` is
the time that the bytes of `ours` would take at the memory's speed, over the time that it takes, checks included: bytes
that stay on a rank are copied once, and so are those that move. Each turn begins after a short rest: what ran before
has left the processes unevenly on the cores.

    python benchmarks/reshard.py --json benchmarks/results/reshard.json
"""

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from math import prod
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ductile
from ductile.cluster.node import FREED_MEMORY_STAYS
from ductile.core.layout.geometry.layout import Layout, Tensor
from ductile.core.layout.geometry.mesh import Mesh
from ductile.core.layout.geometry.sharding import Shard, place
from ductile.core.transfer.plan import Plan
from ductile.core.transfer.planning import Planner
from ductile.core.transfer.topology import MIB
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
OURS = ("ours", "first call", "transfer", "transfer unverified", "messages", "messages unverified")
PEERS_OF = {"weights": ("dcp", "dtensor", "mcore"), "moments": ("dcp", "dtensor")}
"""By table."""
KINDS = {"weights": [""], "moments": ["", "exp_avg.", "exp_avg_sq."]}
VERIFIED = {
    "ours": "all bytes that move, by xxh3 on both sides, compared by all ranks before anybody returns",
    "first call": "all bytes that move, by xxh3 on both sides, compared by all ranks before anybody returns",
    "transfer": "all bytes that move, by xxh3 on both sides",
    "messages": "all bytes that move, by xxh3 on both sides",
} | dict.fromkeys(("transfer unverified", "messages unverified", *PEERS), "nothing")
COPIED_BYTES, SENT_BYTES = 192 * MIB, 16 * MIB
"""For the limits: by each process at once."""
REST_S = 0.05
TIMEOUT_S = 120.0
LONGEST_S = 3600.0
"""For all pairs of both tables."""

Times = dict[str, list[float]]
Run = Callable[[], object]


def tensors(kinds: list[str]) -> dict[str, tuple[tuple[int, ...], int | None]]:
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
    table |= {"norm": ((HIDDEN,), None), "head": ((VOCABULARY, HIDDEN), 0)}
    return {kind + name: entry for kind in kinds for name, entry in table.items()}


def layout(tp: int, kinds: list[str]) -> Layout:
    mesh = Mesh.of(range(RANKS), dp_replicate=RANKS // tp, tp=tp)
    return Layout(
        (
            Tensor(name, "float32", place(shape, mesh, () if dim is None else (Shard("tp", dim),)))
            for name, (shape, dim) in tensors(kinds).items()
        ),
        mesh.slots,
    )


def contents(tp: int, kinds: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's part of each tensor: every element its own number, modulo what fp32 counts exactly."""
    for index, (name, (shape, dim)) in enumerate(tensors(kinds).items()):
        ranges = [torch.arange(length, dtype=torch.int32) for length in shape]
        if dim is not None:
            ranges[dim] = ranges[dim].chunk(tp)[dist.get_rank() % tp]
        numbers = ranges[-1] + 7919 * index
        if len(shape) == 2:
            numbers = ranges[0][:, None] * shape[1] + numbers
        yield name, numbers.bitwise_and_(0xFFFFFF).float()


def local(tp: int, kinds: list[str], fill: bool) -> dict[str, torch.Tensor]:
    """This rank's tensors, in memory as the trainer has it: `contents`, or zeros."""
    found: dict[str, torch.Tensor] = {}
    for name, (shape, dim) in tensors(kinds).items():
        cut = tuple(length // tp if axis == dim else length for axis, length in enumerate(shape))
        found[name] = pages.zeros(prod(cut), torch.float32, "cpu").view(cut)
    if fill:
        for name, numbers in contents(tp, kinds):
            found[name].copy_(numbers)
    return found


def measure_pair(
    tp: tuple[int, int], kinds: list[str], contenders: list[str], repeats: int, folder: str
) -> dict[str, Any]:
    """What this rank measured for one change of layout."""
    before, after = tp
    probes = limits()  # before the states: the last ones to come may find no huge pages any more
    job = peers.Job(
        local(before, kinds, fill=True),
        local(after, kinds, fill=False),
        {name: dim for name, (_, dim) in tensors(kinds).items()},
        (RANKS // before, before),
        (RANKS // after, after),
        folder,
    )
    layouts = layout(before, kinds), layout(after, kinds)
    reads, messages = transfers(True, job, layouts), transfers(False, job, layouts)
    runs: dict[str, Run] = dict(zip(OURS, (*library(job), *reads[1], *messages[1]), strict=True))
    runs |= {name: PEERS[name](job) for name in contenders}
    for name, run in runs.items():
        for tensor in job.new.values():
            tensor.zero_()
        dist.barrier()
        run()
        dist.barrier()
        # One tensor at a time: all moments of four whole copies fill the memory twice otherwise.
        wrong = [tensor for tensor, numbers in contents(after, kinds) if not torch.equal(job.new[tensor], numbers)]
        if wrong:
            raise AssertionError(f"{name}: {len(wrong)} tensors are wrong, {wrong[0]} among them")
    for _, run in probes.values():
        run()
    in_turn = runs | {name: run for name, (_, run) in probes.items()}
    times: Times = {name: [] for name in in_turn}
    for _ in range(repeats):
        for name, run in in_turn.items():
            times[name].append(timed(run))
    plans = {"reads": reads[0], "messages": messages[0]}
    found: dict[str, Any] = {
        "times": times,
        "limit_bytes": {name: num_bytes for name, (num_bytes, _) in probes.items()},
        "wire_bytes": reads[0].wire_bytes,
        "kept_bytes": sum(reads[0].kept.values()),
        "plans": {
            name: {
                "operations": plan.num_messages,
                "relayed_bytes": plan.relayed_bytes,
                "max_egress_bytes": max(plan.egress.values()),
                "max_ingress_bytes": max(plan.ingress.values()),
                "modelled_s": plan.predicted_s,
            }
            for name, plan in plans.items()
        },
    }
    if "mcore" in runs:
        refit = runs["mcore"]
        assert isinstance(refit, peers.Refit)
        found["mcore_wire"] = refit.wire
    return found


def library(job: peers.Job) -> tuple[Run, Run]:
    """As somebody calls it who has DTensors and read docs/library.md: with a `Resharder` that is kept, and without."""
    resharder = ductile.Resharder(timeout_s=TIMEOUT_S)
    old, new = peers.dtensors(job.old, job, job.before), peers.dtensors(job.new, job, job.after)

    def run(once: bool) -> None:
        report = ductile.reshard(old, new, timeout_s=TIMEOUT_S) if once else resharder.reshard(old, new)
        assert report.carrier.startswith("peer_memory"), report.carrier

    return partial(run, False), partial(run, True)


def transfers(one_sided: bool, job: peers.Job, layouts: tuple[Layout, Layout]) -> tuple[Plan, list[Run]]:
    """Verified and not."""
    group = dist.group.WORLD
    assert group is not None
    group_exchange = GroupExchange(group, dist.get_rank(), range(RANKS), "cpu", TIMEOUT_S)
    carrier, reason = choose(group_exchange, "cpu", lambda: group, one_sided)
    assert carrier.one_sided == one_sided, reason
    plan = Planner(relays=not one_sided).plan(*layouts)
    return plan, [Transfer(plan, dist.get_rank(), job.old, job.new, carrier, verify).run for verify in ("moved", "off")]


def timed(run: Run) -> float:
    dist.barrier()
    time.sleep(REST_S)
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def limits() -> dict[str, tuple[int, Run]]:
    """(bytes of all processes together, what moves them): copied in memory, and sent through gloo."""
    copied = [pages.zeros(COPIED_BYTES, torch.uint8, "cpu") for _ in range(2)]
    others = [rank for rank in range(RANKS) if rank != dist.get_rank()]
    staged = {rank: [torch.ones(SENT_BYTES, dtype=torch.uint8) for _ in range(2)] for rank in others}

    def exchange() -> None:
        for _ in range(4):
            works = [dist.irecv(staged[rank][0], rank) for rank in others]
            works += [dist.isend(staged[rank][1], rank) for rank in others]
            for work in works:
                assert work is not None
                work.wait()

    return {
        "memory": (RANKS * COPIED_BYTES, partial(copy, *copied)),
        "loopback": (4 * RANKS * len(others) * SENT_BYTES, exchange),
    }


def rank_main(connection: Connection, rank: int, address: str, options: argparse.Namespace, tmpfs: str) -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=rendezvous.connect(address, TIMEOUT_S), rank=rank, world_size=RANKS)
    found: dict[str, Any] = {}
    for table in options.tables:
        found[table] = {}
        for name in options.pairs:
            folder = f"{tmpfs}/{table}-{name}"
            contenders = [peer for peer in PEERS_OF[table] if peer not in missing()]
            found[table][name] = measure_pair(PAIRS[name], KINDS[table], contenders, options.repeats, folder)
            gc.collect()
            heap.trim()  # what contenders have allocated and freed by themselves: the moments need the room
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                print(f"{table} {name} measured", file=sys.stderr, flush=True)
    connection.send(found)
    dist.barrier()
    dist.destroy_process_group()


def missing() -> list[str]:
    """Peers that are not installed."""
    return [] if find_spec("megatron") else ["mcore"]


def run_ranks(context: ForkServerContext, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What every rank measured."""
    store = rendezvous.host_store()
    started = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="reshard-") as tmpfs:
        for rank in range(RANKS):
            mine, theirs = context.Pipe()
            arguments = (theirs, rank, f"127.0.0.1:{store.port}", options, tmpfs)
            process = context.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            started.append((process, mine))
        until_s = time.monotonic() + LONGEST_S
        for rank, (_, connection) in enumerate(started):
            if not connection.poll(max(0.0, until_s - time.monotonic())):
                raise TimeoutError(f"rank {rank} was still at work after {LONGEST_S / 60:.0f} minutes")
        found = [connection.recv() for _, connection in started]
    for process, _ in started:
        process.join(30.0)
    return found


def summarise(ranks: list[dict[str, Any]], table: str) -> list[dict[str, Any]]:
    """One row a pair: medians of the slowest rank's times."""
    rows: list[dict[str, Any]] = []
    for pair in ranks[0][table]:
        of_ranks = [rank[table][pair] for rank in ranks]
        first = of_ranks[0]
        times = {
            name: [max(values) for values in zip(*(rank["times"][name] for rank in of_ranks), strict=True)]
            for name in first["times"]
        }
        median = {name: statistics.median(values) for name, values in times.items()}
        speed = {name: num_bytes / median[name] for name, num_bytes in first["limit_bytes"].items()}
        wire, kept = first["wire_bytes"], first["kept_bytes"]
        by_memory = (wire + kept) / speed["memory"]
        by_loopback = wire / speed["loopback"] + kept / speed["memory"]
        best = min((name for name in PEERS if name in median), key=lambda name: median[name])
        row: dict[str, Any] = {
            "pair": pair,
            "moves": f"{wire / MIB:.0f} MiB between ranks" if wire else "no bytes between ranks",
        }
        row |= {f"{name.replace(' ', '_')}_s": median[name] for name in (*OURS, *PEERS) if name in median}
        row |= {
            "best_peer": best,
            "ratio_vs_best_peer": median[best] / median["ours"],
            "first_call_ratio_vs_best_peer": median[best] / median["first call"],
            "transfer_ratio_vs_best_peer": median[best] / median["transfer"],
            "messages_ratio_vs_best_peer": median[best] / median["messages"],
            "fraction_of_limit": by_memory / median["ours"],
            "transfer_fraction_of_limit": by_memory / median["transfer"],
            "messages_fraction_of_limit": by_loopback / median["messages"],
            "limits_bytes_s": speed,
            "wire_bytes": wire,
            "kept_bytes": kept,
            "min_s": {name: min(values) for name, values in times.items()},
            "max_s": {name: max(values) for name, values in times.items()},
            "plans": first["plans"],
        }
        if "mcore_wire" in first:
            row["mcore_operations"] = sum(rank["mcore_wire"][0] for rank in of_ranks)
            row["mcore_wire_bytes"] = sum(rank["mcore_wire"][1] for rank in of_ranks)
        rows.append(row)
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}; seconds, medians. All of ours are verified but where it says so; the peers verify nothing.")
    heads = ("ours", "1st call", "transfer", "- unver.", "messages", "- unver.", *PEERS)
    print(f"{'':8}" + "".join(f"{head:>10}" for head in heads) + f"{'x peer':>8}{'of limit':>10}   moves")
    for row in rows:
        columns = [f"{name.replace(' ', '_')}_s" for name in (*OURS, *PEERS)]
        cells = "".join(f"{row[name]:10.3f}" if name in row else f"{'-':>10}" for name in columns)
        ratio, fraction = row["ratio_vs_best_peer"], row["fraction_of_limit"]
        print(f"{row['pair']:8}{cells}{ratio:8.2f}{fraction:10.2f}   {row['moves']}")
    speeds = [row["limits_bytes_s"] for row in rows]
    for name in ("memory", "loopback"):
        slowest, fastest = (pick(speed[name] for speed in speeds) / 1e9 for pick in (min, max))
        print(f"limit of the {name}: {slowest:.1f} to {fastest:.1f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tables", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    options = parser.parse_args()
    if missing():
        print("megatron-core is not installed (pip install -e .[bench]): mcore is not measured", file=sys.stderr)
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # torch reads it when a process allocates for the first time
    os.environ |= FREED_MEMORY_STAYS  # read when a process starts
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "torch.distributed.tensor"])
    ranks = run_ranks(context, options)
    packages = ("torch", "numpy", *(() if missing() else ("megatron-core",)))
    origin = {**provenance(*packages), "repeats": options.repeats, "verified": VERIFIED, "not_measured": missing()}
    # A table that was not measured now stays as it is; it says itself of which commit it is.
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    if "weights" in options.tables:
        rows = summarise(ranks, "weights")
        results |= {**origin, "pairs": rows}
        show("weights, 790 MiB", rows)
    if "moments" in options.tables:
        rows = summarise(ranks, "moments")
        results["with_moments"] = {**origin, "pairs": rows}
        show("weights and moments, 2370 MiB", rows)
    write(options.json, results, indent=1)


if __name__ == "__main__":
    main()
