"""How close does each arm come to what is possible? Many small scenarios, simulated, one line each.

    python benchmarks/schedules.py --json benchmarks/results/schedules.json
    python benchmarks/schedules.py --scenarios held_out --only async --arms model --gantt

Work, speeds and costs are like those of six slots on a few cores. `bound` is what no schedule can beat: all slots busy
all the time at the best batch size, and the longest completion alone from first token to gradient. None comes near it:
a group is trained when its longest completion is there, and the last completions decode in small batches. `tuned` is
what policies are tuned on; `held_out` is kept for checking them.
"""

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
                        draw,
                        groups=groups,
                        max_tokens=limit,
                        train_tokens_per_s=train,
                        per_sequence_s=per_sequence,
                    )


def held_out() -> Iterator[Case]:
    one = geometric((1.0, 60.0))
    for slots in (4, 8, 16):
        yield Case(f"{slots} slots", one, slots=slots, groups=8 * slots)
        yield Case(f"{slots} slots, few groups", one, slots=slots, groups=4 * slots, train_tokens_per_s=2000.0)
    for sigma in (0.8, 1.0, 1.3):
        for alike in (0.0, 0.5, 1.0):
            yield Case(f"lognormal {sigma}, alike {alike}", lognormal(40, sigma), max_tokens=768, alike=alike)
    for per_sequence in (0.0002, 0.0012):
        yield Case(f"async 1, {1e3 * per_sequence} ms", one, max_async_level=1, per_sequence_s=per_sequence)
        yield Case(f"4 minibatches, {1e3 * per_sequence} ms", one, n_minibatches=4, per_sequence_s=per_sequence)
        yield Case(f"costs x 10, {1e3 * per_sequence} ms", one, costs=10.0, per_sequence_s=per_sequence)
        yield Case(f"32 sequences a slot, {1e3 * per_sequence} ms", one, max_num_seqs=32, per_sequence_s=per_sequence)
    yield Case("8 x 8", one, groups=8)
    yield Case("12 steps", one, steps=12)


CASES = {"tuned": tuned, "held_out": held_out}


def bound_s(scenario: Scenario) -> float:
    """Seconds that a step takes at least, by the work of all steps on average."""
    work, speeds, num_slots = scenario.work, scenario.speeds, scenario.placement.num_slots
    decode, full = speeds.decode, scenario.limits.max_num_seqs
    fixed_s = 0.0 if work.max_async_level else speeds.optim_s * work.n_minibatches + speeds.publish_s + speeds.receive_s
    total_s = 0.0
    lengths = list(_lengths(scenario))
    per_step = work.rollouts_per_step
    for step in range(work.num_steps):
        here = lengths[step * per_step : (step + 1) * per_step]
        generate_s = sum(here) * decode.seconds(full) / full
        tokens = sum(here) + work.prompt_tokens * len(here)
        longest_s = max(here) * decode.seconds(1) + speeds.train.seconds(max(here) + work.prompt_tokens, 1)
        busy_s = _all_busy_s(generate_s, tokens, speeds, num_slots)
        total_s += fixed_s + (busy_s if work.max_async_level else max(busy_s, longest_s))
    return total_s / work.num_steps


def _all_busy_s(generate_s: float, tokens: float, speeds: Speeds, num_slots: int) -> float:
    """When both end at once, on the best split of the slots, whole or not. The more slots train, the slower is each."""
    few, many = 0.0, float(num_slots)
    for _ in range(50):
        train = (few + many) / 2
        train_is_late = tokens * (num_slots - train) > generate_s * speeds.train.of(train)
        few, many = (train, many) if train_is_late else (few, train)
    return generate_s / (num_slots - few)


def _lengths(scenario: Scenario) -> Iterator[int]:
    """Of as many completions as the run has; drawn alike, if not the very same."""
    work = scenario.work
    for group in range(work.num_steps * work.groups_per_step):
        for member in range(work.group_size):
            yield work.length(f"bound/{group}", f"bound/{group}/{member}/0")


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--gantt", action="store_true", help="a picture of the last arm's last step")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    cases = [case for name in given.scenarios for case in CASES[name]() if given.only in case.name]
    rows = [row for case in cases for row in _run(case, given)]
    for arm in given.arms:
        gains = [row["wall_s"] / row["best_s"] - 1 for row in rows if row["arm"] == arm]
        print(f"{arm:16} against the first arm: mean {sum(gains) / len(gains):+.1%}, worst {max(gains):+.1%}")
    write(given.json, {"rows": rows, **provenance("numpy")}, indent=1)


def _run(case: Case, given: argparse.Namespace) -> Iterator[dict[str, object]]:
    least_s = bound_s(case.scenario)
    print(f"{case.name}: bound {least_s:.2f} s a step", flush=True)
    best = None
    for outcome in run_arms(case.scenario, given.arms):
        best = best or outcome
        print(line(case, best, outcome), flush=True)
        result = outcome.result
        yield {
            "case": case.name,
            "arm": outcome.name,
            "bound_s": least_s,
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
