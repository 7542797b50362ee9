"""What deciding costs: seconds that a policy takes to decide, in simulated runs on few slots and on many.

    python benchmarks/decisions.py

A hundred rollouts a slot in two on-policy steps, in groups of 16 with long-tailed completions; a quarter of the slots
trains at first. Slots, time and rollouts are simulated; deciding is the policies' real work on this machine's core.
`simulating_s` is what the whole simulation took.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

from budget import Budget, arguments
from ductile.core.instances.placement import Placement
from ductile.core.scheduling.costs.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.sim.arms import named
from ductile.sim.run import simulate
from ductile.sim.scenario import Scenario, WorkLoad, lognormal
from provenance import provenance, write

STEPS, GROUP_SIZE, ROLLOUTS_PER_SLOT = 2, 16, 100


def scenario(num_slots: int) -> Scenario:
    train = num_slots // 4
    return Scenario(
        placement=Placement(tuple(range(train)), tuple(range(train, num_slots)), (), "a quarter trains"),
        work=WorkLoad(
            num_steps=STEPS,
            groups_per_step=num_slots * ROLLOUTS_PER_SLOT // GROUP_SIZE // STEPS,
            group_size=GROUP_SIZE,
            prompt_tokens=256,
            max_tokens=16_384,
            draw=lognormal(2_000, 0.9),
        ),
        speeds=Speeds(
            decode=DecodeSpeed(0.008, 0.0001),
            prefill_tokens_per_s=20_000,
            train=TrainSpeed(5_000, overhead=0.0005, micro_step_s=0.05),
            optim_s=0.5,
            publish_s=0.5,
            receive_s=0.2,
        ),
        costs=SwitchCosts(resize_s=0.5, prepare_s=1.0, assign_s=0.5, release_s=0.05, migration_s=0.005),
        limits=Limits(max_num_seqs=64),
        coalesce_s=0.5,
    )


@dataclass(frozen=True)
class Row:
    policy: str
    slots: int
    rollouts: int
    decisions: int
    changes: int
    median_ms: float
    p99_ms: float
    longest_ms: float
    simulating_s: float


def row(policy: str, num_slots: int) -> Row:
    began_s = time.perf_counter()
    result = simulate(scenario(num_slots), named(policy))
    took_s = time.perf_counter() - began_s
    ms = sorted(1e3 * each for each in result.decide_s)
    return Row(
        policy,
        num_slots,
        result.num_rollouts,
        len(ms),
        len(result.changes),
        statistics.median(ms),
        ms[round(0.99 * (len(ms) - 1))],
        ms[-1],
        took_s,
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--policies", nargs="+", default=["rules", "model"])
    given = parser.parse_args()
    budget, rows = Budget(given.budget), list[dict[str, Any]]()
    cases = {f"{policy}, {slots} slots": (policy, slots) for slots in given.slots for policy in given.policies}
    for _, case in budget.turns(list(cases)):
        found = row(*cases[case])
        print(
            f"{case:20} {found.rollouts:7} rollouts  {found.decisions:5} decisions  "
            f"median {found.median_ms:6.1f} ms  99th of 100 {found.p99_ms:6.1f}  longest {found.longest_ms:6.1f}  "
            f"{found.changes:4} changes, simulated in {found.simulating_s:.1f} s",
            flush=True,
        )
        rows.append(vars(found))
        # Each time: the last ones take minutes, and nothing ends them in between.
        write(given.json, {"rows": rows, **budget.told, **provenance("numpy")})


if __name__ == "__main__":
    main()
