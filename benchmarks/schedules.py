"""When do policies that move slots help? Many small scenarios, simulated, one line an arm.

    python benchmarks/schedules.py
    python benchmarks/schedules.py --scenarios tuned --only async --arms model --gantt

Work, speeds and costs are like those of six slots on a few cores. `tuned` is what policies are tuned on; `held_out` is
kept for checking them. Every machine finds the same, sooner or later.
"""

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from budget import Budget, arguments
from ductile.core.instances.placement import Placement
from ductile.core.scheduling.costs.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.sim.arms import ArmOutcome, run_arms
from ductile.sim.scenario import DrawLength, Scenario, WorkLoad, lognormal
from ductile.sim.timeline import causes, gantt
from provenance import provenance, write

ARMS = ("best_static", "collocated", "rules", "rules_policies", "model")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    kind: str
    """What the case is one of."""
    draw: DrawLength
    slots: int = 6
    groups: int = 64
    train_tokens_per_s: float = 3000.0
    per_sequence_s: float = 0.0006
    max_tokens: int = 640
    max_num_seqs: int = 64
    alike: float = 0.0
    costs: float = 1.0
    """Times the usual ones."""
    n_minibatches: int = 1
    max_async_level: int = 0
    steps: int = 4

    @property
    def scenario(self) -> Scenario:
        return Scenario(
            placement=Placement((0, 1), tuple(range(2, self.slots)), (), "two train"),
            work=WorkLoad(
                num_steps=self.steps,
                groups_per_step=self.groups,
                group_size=8,
                prompt_tokens=14,
                max_tokens=self.max_tokens,
                draw=self.draw,
                alike=self.alike,
                n_minibatches=self.n_minibatches,
                max_async_level=self.max_async_level,
                seq_len=1024,
            ),
            speeds=Speeds(
                decode=DecodeSpeed(0.004, self.per_sequence_s),
                prefill_tokens_per_s=3 * self.train_tokens_per_s,
                train=TrainSpeed(self.train_tokens_per_s, overhead=0.03, micro_step_s=0.02),
                optim_s=0.03,
                publish_s=0.05,
                receive_s=0.02,
            ),
            costs=SwitchCosts(
                resize_s=0.2 * self.costs,
                assign_s=0.15 * self.costs,
                release_s=0.02 * self.costs,
                migration_s=0.002 * self.costs,
            ),
            limits=Limits(max_num_seqs=self.max_num_seqs),
            coalesce_s=0.1,
        )


def geometric(*means: tuple[float, float]) -> DrawLength:
    """One of several geometric distributions, given as (share, mean)."""

    def draw(source: random.Random) -> float:
        (mean,) = source.choices([mean for _, mean in means], [share for share, _ in means])
        return int(math.log(max(1e-9, source.random())) / math.log(1 - 1 / mean)) + 1

    return draw


def tuned() -> Iterator[Case]:
    one, two = geometric((1.0, 60.0)), geometric((0.8, 40.0), (0.2, 100.0))
    for groups in (32, 64):
        for name, draw, limit in (("one geometric", one, 640), ("two", two, 768)):
            for train in (1500.0, 3000.0, 6000.0):
                for per_sequence in (0.0002, 0.0006, 0.0012):
                    yield Case(
                        f"{groups} x 8, {name}, train {train:.0f}/s, sequence {1e3 * per_sequence:.1f} ms",
                        f"tuned, train {train:.0f}/s",
                        draw,
                        groups=groups,
                        max_tokens=limit,
                        train_tokens_per_s=train,
                        per_sequence_s=per_sequence,
                    )


def held_out() -> Iterator[Case]:
    one = geometric((1.0, 60.0))
    for slots in (4, 8, 16):
        kind = "4, 8 and 16 slots"
        yield Case(f"{slots} slots", kind, one, slots=slots, groups=8 * slots)
        yield Case(f"{slots} slots, few groups", kind, one, slots=slots, groups=4 * slots, train_tokens_per_s=2000.0)
    for sigma in (0.8, 1.0, 1.3):
        for alike in (0.0, 0.5, 1.0):
            kind = "lognormal lengths" + (", siblings about as long as each other" if alike else "")
            name = f"lognormal {sigma}, alike {alike}"
            yield Case(name, kind, lognormal(40, sigma), max_tokens=768, alike=alike)
    for per_sequence in (0.0002, 0.0012):
        ms = f"{1e3 * per_sequence} ms"
        kind = "generation may run one step ahead"
        yield Case(f"async 1, {ms}", kind, one, max_async_level=1, per_sequence_s=per_sequence)
        kind = "four optimizer steps a batch"
        yield Case(f"4 minibatches, {ms}", kind, one, n_minibatches=4, per_sequence_s=per_sequence)
        kind = "changes cost ten times as much"
        yield Case(f"costs x 10, {ms}", kind, one, costs=10.0, per_sequence_s=per_sequence)
        kind = "at most 32 sequences a generator"
        yield Case(f"32 sequences a slot, {ms}", kind, one, max_num_seqs=32, per_sequence_s=per_sequence)
    yield Case("8 x 8", "8 x 8 rollouts: the step is one long completion", one, groups=8)
    yield Case("12 steps", "12 steps instead of 4: the first one counts less", one, steps=12)


CASES = {"tuned": tuned, "held_out": held_out}


def line(case: Case, best: ArmOutcome, outcome: ArmOutcome) -> str:
    """What became of one arm."""
    result, steps = outcome.result, case.steps
    slot_seconds = result.wall_s * result.num_slots
    gain = "" if outcome is best else f"{100 * (result.wall_s / best.result.wall_s - 1):+.0f} %"
    split = f" ({len(best.placement.train)} train)" if outcome is best else ""
    return (
        f"  {outcome.name + split:24}{result.wall_s / steps:7.2f} s{gain:>7}  {len(result.changes):3} changes  "
        f"switch {result.totals.get('switch', 0) / slot_seconds:5.1%}  idle {causes(result.idle, slot_seconds)}"
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--scenarios", nargs="+", choices=list(CASES), default=["held_out"])
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--gantt", action="store_true", help="a picture of the last arm's last step")
    given = parser.parse_args()
    cases = {case.name: case for name in given.scenarios for case in CASES[name]() if given.only in case.name}
    budget, rows = Budget(given.budget), list[dict[str, Any]]()
    for _, name in budget.turns(list(cases)):
        rows += _run(cases[name], given)
    for arm in given.arms:
        gains = [row["wall_s"] / row["best_s"] - 1 for row in rows if row["arm"] == arm]
        if gains:
            print(f"{arm:16} against the first arm: mean {sum(gains) / len(gains):+.1%}, worst {max(gains):+.1%}")
    write(given.json, {"rows": rows, **budget.told, **provenance("numpy")}, indent=1)


def _run(case: Case, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    print(f"{case.name}:", flush=True)
    best = None
    for outcome in run_arms(case.scenario, given.arms):
        best = best or outcome
        print(line(case, best, outcome), flush=True)
        result = outcome.result
        yield {
            "case": case.name,
            "kind": case.kind,
            "arm": outcome.name,
            "wall_s": result.wall_s,
            "best_s": best.result.wall_s,
            "switch_s": result.totals.get("switch", 0.0),
            "num_changes": len(result.changes),
            "slots": result.num_slots,
        }
        if given.gantt and outcome.name == given.arms[-1]:
            for change in result.changes:
                print(f"  {change.at_s:6.2f} s  {change.decision.reason}")
            print(gantt(result.spans, width=120, start_s=sum(result.step_s[:-1])))


if __name__ == "__main__":
    main()
