"""What a reshard plan costs to make, for Qwen3-32B on many slots. No tensors, no processes: plans only.

Milliseconds on one core for a plan whose geometry was never seen, for one whose classes are known, and for one from the
cache (layouts made anew, so that their content is hashed again); and for one slot to list its messages. Medians.
Slots share machines of eight: the planner then levels two kinds of links, which is the slower case.

    python benchmarks/plan.py
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from budget import Budget, arguments
from ductile.core.layout.geometry.layout import Layout
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.strategy import model_layout
from ductile.core.layout.geometry.topology import Topology
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.transfer.planning import Planner
from provenance import provenance, write

T = TypeVar("T")
QWEN3_32B = ModelSpec("qwen3", 151_936, 5120, 25_600, 64, num_heads=64, num_kv_heads=8, head_dim=128, qk_norm=True)
CASES = {
    "128 slots, tp 8 to 4": (
        ParallelLayout.of(range(128), pp=2, dp_replicate=8, tp=8),
        ParallelLayout.of(range(128), pp=2, dp_replicate=16, tp=4),
    ),
    "1024 slots, tp 8 to 4": (
        ParallelLayout.of(range(1024), pp=2, dp_replicate=64, tp=8),
        ParallelLayout.of(range(1024), pp=2, dp_replicate=128, tp=4),
    ),
    "FSDP 512 to 1024": (ParallelLayout.of(range(512)), ParallelLayout.of(range(1024))),
    "HSDP 8x128 to 4x256": (
        ParallelLayout.of(range(1024), dp_replicate=8, dp_shard=128),
        ParallelLayout.of(range(1024), dp_replicate=4, dp_shard=256),
    ),
    "FSDP on tp 8 to 4": (
        ParallelLayout.of(range(1024), dp_shard=128, tp=8),
        ParallelLayout.of(range(1024), dp_replicate=4, dp_shard=64, tp=4),
    ),
    "8 slots to 1024": (
        ParallelLayout.of(range(8), tp=8),
        ParallelLayout.of(range(1024), dp_replicate=128, tp=8),
    ),
}
"""From a layout to another one."""


def milliseconds(work: Callable[[], T], repeats: int) -> tuple[float, T]:
    """The median, and what the last one returned."""
    taken: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken), result


def measure(case: str, repeats: int) -> dict[str, Any]:
    before, after = CASES[case]
    num_slots = max(len(before.slots), len(after.slots))
    topology = Topology(tuple(tuple(range(first, first + 8)) for first in range(0, num_slots, 8)))

    def layouts() -> tuple[Layout, Layout]:
        return model_layout(QWEN3_32B, before, "bfloat16"), model_layout(QWEN3_32B, after, "bfloat16")

    layouts_ms, (source, target) = milliseconds(layouts, 1)
    cold_ms, plan = milliseconds(lambda: Planner(topology).plan(source, target), repeats)
    planner = Planner(topology)
    planner.plan(source, target)

    def known() -> None:
        planner.forget_plans()
        planner.plan(source, target)

    known_ms, _ = milliseconds(known, repeats)
    cached_ms, found = milliseconds(partial(planner.plan, *layouts()), 1)
    assert found is planner.plan(source, target)
    slot_ms, _ = milliseconds(lambda: list(plan.rounds(after.slots[-1])), repeats)
    return {
        "case": case,
        "num_slots": num_slots,
        "layouts_ms": layouts_ms,
        "cold_ms": cold_ms,
        "known_classes_ms": known_ms,
        "cached_ms": cached_ms,
        "one_slot_ms": slot_ms,
        "num_classes": plan.refinement.num_classes,
        "num_flows": len(plan.flows),
        "num_rounds": plan.num_rounds,
        "wire_bytes": plan.wire_bytes,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="case")
    given = parser.parse_args()
    budget, rows = Budget(given.budget), list[dict[str, Any]]()
    print(f"{'Qwen3-32B':24} {'layouts':>9} {'cold':>9} {'known':>9} {'cached':>9} {'one slot':>9} ms  classes   flows")
    for _, case in budget.turns(given.cases):
        rows.append(row := measure(case, given.repeats))
        times = [row[f"{name}_ms"] for name in ("layouts", "cold", "known_classes", "cached", "one_slot")]
        told = " ".join(f"{each_ms:9.2f}" for each_ms in times)
        print(f"{case:24} {told}     {row['num_classes']:7d} {row['num_flows']:7d}", flush=True)
    write(given.json, {**provenance("numpy"), "speed": rows, **budget.told}, indent=1)


if __name__ == "__main__":
    main()
