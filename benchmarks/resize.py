"""Seconds that a live trainer stands still when it changes its slots, against checkpoint and restart, in one run.

About 100 M parameters, AdamW, fp32 masters, FSDP2 on processes of this host, driven through the real control plane. The
trainer goes through

    slots 0,1 -> 0,1,2 -> 0,1,2,3 -> 0 -> 0,1 -> 2,3

once between two batches and once in the middle of one, when the accumulated gradient moves as well. While slots
prepare, training goes on; the pause is all the time in which the trainer could not work.

Then, pair by pair, it goes to a layout with other axes and back, `--rounds` times between two batches and as often in
the middle of one:

    tp2->tp4    dp4->pp2·tp2    dp2->cp2·dp2    pp2->dp2

The other way to do it, for the first three changes and for each pair: write the state (torch's distributed
checkpoint), end all workers, start new ones (one process imports torch, which is in the page cache, and forks them),
build the trainer from the model folder, read the state. What was accumulated is lost. The orchestrator lives on, so its
own restart does not count. The checkpoint is once on disk, as a run writes it, and once in memory (/dev/shm).

What does not fit into the budget is left out.

    python benchmarks/resize.py
"""

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from budget import Budget, CannotGoOn, arguments
from ductile.cluster.local import LocalCluster
from ductile.config.schema.cluster import ClusterConfig
from ductile.config.schema.trainer import AdamWConfig, SFTLoss, TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.elastic.transaction import ResizeOptions, Transaction
from ductile.fleet.requests.assign_role import assign_role
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.records import Sample
from ductile.transport.deadlines import Deadlines
from models import QWEN3, SMALL, make_model
from provenance import provenance, write

LAYOUTS = [ParallelLayout.of(slots) for slots in ((0, 1), (0, 1, 2), (0, 1, 2, 3), (0,), (0, 1), (2, 3))]
PAIRS = {
    "tp2->tp4": (ParallelLayout.of(range(2), tp=2), ParallelLayout.of(range(4), tp=4)),
    "dp4->pp2·tp2": (ParallelLayout.of(range(4)), ParallelLayout.of(range(4), pp=2, tp=2)),
    "dp2->cp2·dp2": (ParallelLayout.of(range(2)), ParallelLayout.of(range(4), cp=2)),
    "pp2->dp2": (ParallelLayout.of(range(2), pp=2), ParallelLayout.of(range(2))),
}
"""From a layout to another one, whose slots the first one's are among."""
SLOTS = "the changes of slots"
SEQ_LEN = 32
SAMPLES_A_RANK = 1
"""In half a batch; each is a micro-step."""
TIMEOUT_S = 120.0
States = dict[str, Path]
"""Folders for checkpoints, by where they are."""


def samples(count: int) -> list[Sample]:
    """Each fills a micro-batch."""
    mask = (False,) + (True,) * (SEQ_LEN - 1)
    return [Sample(tuple((7 * i + 13 * n) % 512 for i in range(SEQ_LEN)), mask) for n in range(count)]


class Live:
    """A trainer on real slots."""

    def __init__(self, cluster: LocalCluster, settings: TrainerConfig) -> None:
        self.cluster, self.settings = cluster, settings.model_dump(mode="json")
        self.timeout_s = settings.resize.timeout_s
        """Of a change."""

    async def begin(self, layout: ParallelLayout) -> None:
        """A new trainer on new workers, with a step behind it."""
        await self.restart_workers(range(4))
        await self.assign(layout)
        await self.step()

    async def restart_workers(self, slots: Iterable[int]) -> None:
        await self.cluster.stop()
        self.cluster.slots = tuple(slots)
        await self.cluster.start()
        self.terms = ResizeOptions(self.settings, self.cluster.rendezvous, self.timeout_s, leave_s=5)

    async def assign(self, layout: ParallelLayout) -> None:
        await assign_role(self.cluster.mailbox, "train", self.settings, [layout], TIMEOUT_S, self.cluster.rendezvous)
        self.trainer = RemoteTrainer(self.cluster.mailbox, layout, Deadlines.same(TIMEOUT_S))

    async def half_a_batch(self) -> float:
        began_s = time.perf_counter()
        await self.trainer.forward_backward(samples(SAMPLES_A_RANK * self.trainer.num_ranks), SEQ_LEN)
        return time.perf_counter() - began_s

    async def optim_step(self) -> float:
        began_s = time.perf_counter()
        await self.trainer.optim_step(1000.0)
        return time.perf_counter() - began_s

    async def step(self) -> float:
        return await self.half_a_batch() + await self.optim_step()


async def resize(live: Live, after: ParallelLayout, inside: bool) -> dict[str, Any]:
    """One change while the trainer works, in the middle of a batch or between two; then a step."""
    before = live.trainer.layout
    if inside:
        await live.half_a_batch()
    transaction = Transaction(live.cluster.mailbox, live.trainer, after, live.terms, live.cluster.condemn)
    result = await transaction.run()
    if result.outcome != "resized":
        raise CannotGoOn(f"{named(before)} -> {named(after)}: {result.reason}")
    first_step_s = await live.step()
    slots = result.slot_seconds
    return {
        "before": list(before.slots),
        "after": list(after.slots),
        "layouts": f"{named(before)} -> {named(after)}",
        "in_a_batch": inside,
        "moved_bytes": result.num_bytes,
        "carrier": result.carrier,
        "pause_s": result.pause_s,
        "freeze_s": result.seconds["freeze"],
        "plan_s": slots["plan"],
        "carrier_s": slots["carrier"],
        "groups_s": slots["groups"],
        "build_s": slots.get("build", 0.0),
        "load_s": slots.get("load", 0.0),
        "bind_s": slots.get("bind", 0.0),
        "transfer_s": slots["transfer"],
        "rebuild_s": slots["rebuild"],
        "commit_s": result.seconds["commit"],
        "finalize_s": result.seconds["finalize"],
        "first_step_s": first_step_s,
    }


async def restart(live: Live, after: ParallelLayout, folder: Path) -> float:
    """The same change by way of a checkpoint: seconds until the trainer could work again."""
    state = folder / "state"
    began_s = time.perf_counter()
    await live.trainer.save(str(state))
    await live.restart_workers(after.slots)
    await live.assign(after)
    await live.trainer.load(str(state))
    seconds = time.perf_counter() - began_s
    shutil.rmtree(state)
    return seconds


async def along_slots(live: Live, states: States) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """The changes of `LAYOUTS`, and the restarts in place of the first three."""
    rows: list[dict[str, Any]] = []
    for inside in (False, True):
        await live.begin(LAYOUTS[0])
        for after in LAYOUTS[1:]:
            rows.append(await resize(live, after, inside))
            print(line(rows[-1]), flush=True)
    await live.begin(LAYOUTS[0])
    restarts: dict[str, list[float]] = {where: [] for where in states}
    for after in LAYOUTS[1:4]:
        for where, state in states.items():
            restarts[where].append(await restart(live, after, state))
            print(f"{slots_of(after):8} checkpoint {where}, restart {restarts[where][-1]:.2f} s", flush=True)
    return rows, restarts


async def there_and_back(live: Live, pair: str, rounds: int, states: States) -> dict[str, Any]:
    """A row of `pairs`: `pause_s` and `bytes` are of the way there, `back_pause_s` of the way back."""
    before, after = PAIRS[pair]
    await live.begin(before)
    there: list[dict[str, Any]] = []
    back: list[dict[str, Any]] = []
    for inside in [False, True] * rounds:
        for layout, rows in ((after, there), (before, back)):
            rows.append(await resize(live, layout, inside))
            print(f"{rows[-1]['layouts']:24} {line(rows[-1])}", flush=True)
    restarts: dict[str, list[float]] = {where: [] for where in states}
    for where, state in [*states.items()] * rounds:
        restarts[where].append(await restart(live, after, state))
        print(f"{pair:24} checkpoint {where}, restart {restarts[where][-1]:.2f} s", flush=True)
        await resize(live, before, inside=False)
    if not all(row["moved_bytes"] for row in there):
        raise CannotGoOn("nothing went from slot to slot, so this is no pair to measure")
    pause_s, back_pause_s = (statistics.median(row["pause_s"] for row in rows) for rows in (there, back))
    restart_s = {where: statistics.median(seconds) for where, seconds in restarts.items()}
    return {
        "pair": pair,
        "pause_s": pause_s,
        "ratio_vs_restart": restart_s["on disk"] / pause_s,
        "ratio_vs_restart_in_memory": restart_s["in memory"] / pause_s,
        "bytes": min(row["moved_bytes"] for row in there),
        "back_pause_s": back_pause_s,
        "median_restart_s": restart_s,
        "resizes": [*there, *back],
        "restarts_s": restarts,
    }


async def run(
    settings: TrainerConfig, folder: Path, states: States, num_params: int, options: argparse.Namespace, budget: Budget
) -> dict[str, Any]:
    cluster = LocalCluster(range(4), ClusterConfig(device="cpu"), folder)
    await cluster.start()
    found: dict[str, Any] = {"num_params": num_params, "state_bytes": 3 * 4 * num_params, "pairs": []}
    try:
        live = Live(cluster, settings)
        for _, name in budget.turns([SLOTS, *options.pairs]):
            with budget.turn_of(name):
                async with asyncio.timeout(budget.left_s):
                    if name == SLOTS:
                        found |= figures_of(*await along_slots(live, states))
                    else:
                        found["pairs"].append(await there_and_back(live, name, options.rounds, states))
        return found
    finally:
        await cluster.stop()


def named(layout: ParallelLayout) -> str:
    """ "pp2·tp2"."""
    sizes = asdict(layout.dims).items()
    return "·".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "one slot"


def slots_of(layout: ParallelLayout) -> str:
    return ",".join(map(str, layout.slots))


def line(row: dict[str, Any]) -> str:
    before, after = (",".join(map(str, row[end])) for end in ("before", "after"))
    where = "in a batch" if row["in_a_batch"] else "between"
    inside = ("freeze", "bind", "transfer", "rebuild", "commit", "finalize")
    phases = " ".join(f"{name} {row[name + '_s']:.3f}" for name in inside)
    beside = " ".join(f"{name} {row[name + '_s']:.2f}" for name in ("carrier", "plan", "groups", "build", "load"))
    steps = f"first step {row['first_step_s']:.2f}"
    moved = f"{row['moved_bytes'] / 2**20:6.0f} MiB"
    return (
        f"{before:8} -> {after:8} {where:10} {moved}  pause {row['pause_s']:.3f} ({phases})  beside: {beside}; {steps}"
    )


def figures_of(rows: list[dict[str, Any]], restarts: dict[str, list[float]]) -> dict[str, Any]:
    """`ratio_vs_restart` counts every change, also those that carry a gradient, which a restart loses; the ratios
    between batches compare what both can do."""
    pauses = [row["pause_s"] for row in rows]
    between_s = statistics.median(row["pause_s"] for row in rows if not row["in_a_batch"])
    restart_s = {where: statistics.median(seconds) for where, seconds in restarts.items()}
    return {
        "median_pause_s": statistics.median(pauses),
        "max_pause_s": max(pauses),
        "median_pause_between_batches_s": between_s,
        "median_restart_s": restart_s,
        "ratio_vs_restart": restart_s["on disk"] / statistics.median(pauses),
        "ratio_vs_restart_in_memory": restart_s["in memory"] / statistics.median(pauses),
        "ratio_between_batches": restart_s["on disk"] / between_s,
        "ratio_between_batches_in_memory": restart_s["in memory"] / between_s,
        "resizes": rows,
        "restarts_s": restarts,
        "load_average": os.getloadavg(),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--carrier", default="auto", choices=("auto", "peer_memory", "p2p"))
    parser.add_argument("--memory", default="shadow", choices=("shadow", "streaming"))
    parser.add_argument("--pairs", nargs="*", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--rounds", type=int, default=1, help="of each pair, between batches and in one")
    parser.add_argument("--small", action="store_true", help="a tiny model: whether it works, and not how fast")
    args = parser.parse_args()
    budget = Budget(args.budget)
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        num_params = make_model(Path(work) / "model", QWEN3 | (SMALL if args.small else {}))
        settings = TrainerConfig.model_validate(
            {
                "model": {"name": str(Path(work) / "model"), "seq_len": SEQ_LEN},
                "loss": SFTLoss(),
                "optim": AdamWConfig(lr=1e-5),
                "resize": {"carrier": args.carrier, "memory": args.memory, "timeout_s": 60},
            }
        )
        states = {"on disk": Path(work), "in memory": Path(memory)}
        figures = asyncio.run(run(settings, Path(work), states, num_params, args, budget))
    if "resizes" in figures:
        print(
            f"{num_params / 1e6:.1f} M parameters: median pause {figures['median_pause_s']:.3f} s (between batches "
            f"{figures['median_pause_between_batches_s']:.3f} s), longest {figures['max_pause_s']:.3f} s; checkpoint "
            f"and restart takes {figures['ratio_vs_restart']:.1f} times as long (between batches "
            f"{figures['ratio_between_batches']:.1f}), with the checkpoint in memory "
            f"{figures['ratio_vs_restart_in_memory']:.1f} times"
        )
    for pair in figures["pairs"]:
        print(
            f"{pair['pair']}: median pause {pair['pause_s']:.3f} s (back {pair['back_pause_s']:.3f} s), "
            f"{pair['bytes'] / 2**20:.0f} MiB; checkpoint and restart takes {pair['ratio_vs_restart']:.1f} times as "
            f"long, with the checkpoint in memory {pair['ratio_vs_restart_in_memory']:.1f} times"
        )
    write(args.json, figures | budget.told | provenance("ductile", "torch"))


if __name__ == "__main__":
    main()
