"""What a reshard plan costs to make, and how good it is. No tensors, no processes: plans only.

Three tables:
- balance: the pairs of layouts on which other planners were measured, and Qwen3-32B on 128 slots. The busiest sender is
  compared with the exact optimum of a flow network, with relays where the plan has them, and always without.
- speed: milliseconds on one core for a plan whose geometry was never seen, for one whose classes are known, and for one
  from the cache (layouts made anew, so that their content is hashed again); and for one slot to list its messages.
- places: bytes on the wire with the mesh as written, and after choosing who takes which place.

    python benchmarks/plan.py --json benchmarks/results/plan.json
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from bounds import least_egress
from ductile.core.layout.geometry.layout import Layout
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.strategy import model_layout
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.transfer.assignment import arrange
from ductile.core.transfer.planning import Planner
from ductile.core.transfer.topology import MIB, Topology
from layouts import relabelled, zero_layout
from provenance import provenance, write

T = TypeVar("T")
GPT = ModelSpec("llama", 32_000, 1024, 4096, num_layers=12, num_heads=16, num_kv_heads=8, head_dim=64)
QWEN3_32B = ModelSpec("qwen3", 151_936, 5120, 25_600, 64, num_heads=64, num_kv_heads=8, head_dim=128, qk_norm=True)
Side = tuple[dict[str, int], range]
AXES = {"dp": "dp_replicate", "fsdp": "dp_shard"}
"""Axes that the tables call by shorter names."""

BALANCE: list[tuple[ModelSpec, str, Side, Side]] = [
    (GPT, "float32", (dict(tp=2), range(2)), (dict(dp=4, tp=2), range(8))),
    (GPT, "float32", (dict(dp=4, tp=2), range(8)), (dict(tp=2), range(2))),
    (GPT, "float32", (dict(tp=4), range(4)), (dict(dp=4, tp=2), range(8))),
    (GPT, "float32", (dict(pp=2, dp=2, tp=2), range(8)), (dict(dp=2, tp=4), range(8))),
    (GPT, "float32", (dict(dp=2, tp=2), range(4)), (dict(dp=2, tp=4), range(4, 12))),
    (GPT, "float32", (dict(dp=4), range(4)), (dict(tp=8), range(4, 12))),
    (GPT, "float32", (dict(dp=8, tp=8), range(64)), (dict(pp=2, dp=8, tp=4), range(64))),
    (QWEN3_32B, "bfloat16", (dict(pp=2, dp=8, tp=8), range(128)), (dict(pp=2, dp=16, tp=4), range(128))),
]

SPEED: list[tuple[str, Side, Side, bool]] = [
    ("128 slots, tp 8 to 4", (dict(pp=2, dp=8, tp=8), range(128)), (dict(pp=2, dp=16, tp=4), range(128)), False),
    ("the same with ZeRO-1", (dict(pp=2, dp=8, tp=8), range(128)), (dict(pp=2, dp=16, tp=4), range(128)), True),
    ("1024 slots, tp 8 to 4", (dict(pp=2, dp=64, tp=8), range(1024)), (dict(pp=2, dp=128, tp=4), range(1024)), False),
    ("the same with ZeRO-1", (dict(pp=2, dp=64, tp=8), range(1024)), (dict(pp=2, dp=128, tp=4), range(1024)), True),
    ("FSDP 512 to 1024", (dict(fsdp=512), range(512)), (dict(fsdp=1024), range(1024)), False),
    ("HSDP 8x128 to 4x256", (dict(dp=8, fsdp=128), range(1024)), (dict(dp=4, fsdp=256), range(1024)), False),
    ("FSDP on tp 8 to 4", (dict(fsdp=128, tp=8), range(1024)), (dict(dp=4, fsdp=64, tp=4), range(1024)), False),
    ("8 slots to 1024", (dict(tp=8), range(8)), (dict(dp=128, tp=8), range(1024)), False),
]


def layout(spec: ModelSpec, side: Side, dtype: str, zero: bool = False) -> Layout:
    axes, slots = side
    parallel = ParallelLayout.of(slots, **{AXES.get(axis, axis): size for axis, size in axes.items()})
    params = model_layout(spec, parallel, dtype)
    return params | zero_layout(params, parallel.mesh).kind("master.", "float32") if zero else params


def written(side: Side) -> str:
    return f"{' '.join(f'{axis}{size}' for axis, size in side[0].items())} @ {side[1].start}-{side[1].stop - 1}"


def milliseconds(work: Callable[[], T], repeats: int) -> tuple[float, T]:
    """The median, and what the last one returned."""
    taken: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken), result


def measure_balance() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print(
        f"{'from':26} {'to':30} {'wire':>9} {'bound':>9} {'egress':>8} {'optimum':>8} {'ratio':>6} {'direct':>8}  MiB"
    )
    for spec, dtype, source, target in BALANCE:
        plan = Planner().plan(layout(spec, source, dtype), layout(spec, target, dtype))
        egress, best = max(plan.egress.values()), least_egress(plan.lines, plan.relayed_bytes > 0)
        direct = least_egress(plan.lines, relay=False)
        ratio = egress / best if best else 1.0
        rows.append(
            {
                "source": written(source),
                "target": written(target),
                "wire_bytes": plan.wire_bytes,
                "lower_bound_bytes": plan.lower_bound_bytes,
                "max_egress_bytes": egress,
                "optimal_egress_bytes": best,
                "ratio": ratio,
                "optimal_egress_without_relays_bytes": direct,
                "relayed_bytes": plan.relayed_bytes,
                "max_ingress_bytes": max(plan.ingress.values()),
                "predicted_s": plan.predicted_s,
                "num_flows": len(plan.flows),
                "num_messages": plan.num_messages,
            }
        )
        sizes = (plan.wire_bytes, plan.lower_bound_bytes, egress, best)
        print(
            f"{written(source):26} {written(target):30} {sizes[0] / MIB:9.0f} {sizes[1] / MIB:9.0f} "
            f"{sizes[2] / MIB:8.1f} {sizes[3] / MIB:8.1f} {ratio:6.3f} {direct / MIB:8.1f}"
        )
    return rows


def measure_speed(repeats: int) -> list[dict[str, Any]]:
    """Slots share machines of eight: the planner then levels two kinds of links, which is the slower case."""
    rows: list[dict[str, Any]] = []
    print(
        f"\n{'Qwen3-32B':24} {'layouts':>9} {'cold':>9} {'known':>9} {'cached':>9} {'one slot':>9} ms  classes   flows"
    )
    for name, source_side, target_side, zero in SPEED:
        num_slots = max(source_side[1].stop, target_side[1].stop)
        topology = Topology(tuple(tuple(range(first, first + 8)) for first in range(0, num_slots, 8)))

        def layouts(sides: tuple[Side, Side] = (source_side, target_side), zero: bool = zero) -> tuple[Layout, Layout]:
            return layout(QWEN3_32B, sides[0], "bfloat16", zero), layout(QWEN3_32B, sides[1], "bfloat16", zero)

        layouts_ms, (source, target) = milliseconds(layouts, 1)
        cold_ms, plan = milliseconds(lambda: Planner(topology).plan(source, target), repeats)  # noqa: B023
        planner = Planner(topology)
        planner.plan(source, target)

        def known(planner: Planner = planner) -> None:
            planner.forget_plans()
            planner.plan(source, target)  # noqa: B023

        known_ms, _ = milliseconds(known, repeats)
        again = layouts()
        cached_ms, found = milliseconds(lambda: planner.plan(*again), 1)  # noqa: B023
        assert found is planner.plan(source, target)
        slot = target_side[1].stop - 1
        slot_ms, _ = milliseconds(lambda: list(plan.rounds(slot)), repeats)  # noqa: B023
        rows.append(
            {
                "case": name,
                "num_slots": num_slots,
                "zero": zero,
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
        )
        times = " ".join(f"{value:9.2f}" for value in (layouts_ms, cold_ms, known_ms, cached_ms, slot_ms))
        print(f"{name:24} {times}     {plan.refinement.num_classes:7d} {len(plan.flows):7d}", flush=True)
    return rows


def measure_places() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print(f"\n{'Qwen3-32B':26} {'to':26} {'as written':>11} {'arranged':>11} GiB {'choosing':>9} ms")
    for source_side, target_side in (
        ((dict(fsdp=2), range(2)), (dict(fsdp=3), range(3))),
        ((dict(fsdp=8), range(8)), (dict(fsdp=12), range(12))),
        ((dict(pp=2, dp=8, tp=8), range(128)), (dict(pp=2, dp=16, tp=4), range(128))),
        ((dict(fsdp=512), range(512)), (dict(fsdp=1024), range(1024))),
    ):
        source, target = (layout(QWEN3_32B, side, "bfloat16") for side in (source_side, target_side))
        planner = Planner()
        choosing_ms, places = milliseconds(lambda: arrange(source, target), 1)  # noqa: B023
        before = planner.plan(source, target).wire_bytes
        after = planner.plan(source, relabelled(target, places)).wire_bytes
        rows.append(
            {
                "source": written(source_side),
                "target": written(target_side),
                "wire_bytes": before,
                "arranged_wire_bytes": after,
                "choosing_ms": choosing_ms,
            }
        )
        print(
            f"{written(source_side):26} {written(target_side):26} {before / 2**30:11.1f} {after / 2**30:11.1f} "
            f"{choosing_ms:13.1f}"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    results = {
        **provenance("numpy"),
        "balance": measure_balance(),
        "speed": measure_speed(args.repeats),
        "places": measure_places(),
    }
    write(args.json, results, indent=1)


if __name__ == "__main__":
    main()
