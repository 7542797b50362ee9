"""Wall time of a GRPO run with long-tailed completions: slots that stay what they are, against slots that change roles.

Six slots, each a process capped to a fixed share of a core, so that every one is a device of fixed speed: together
they have to leave some of the machine over. Where they do not (six times 0.3 of two cores, of which a host takes a
fifth away at times), whoever keeps all slots busy has slower ones; `stolen` is what the host took. The same model,
prompts, seeds and optimizer steps in every arm, strictly on-policy:

    static           so many slots train, the others generate: the best of `--splits` by its median. All run in the
                     first round, those within `RACE` of its best in all of them
    collocated       all slots generate, then all train
    rules            cluster.policy = "rules", from the split that was the best in the first round
    rules_policies   the same with both optional policies
    model            cluster.policy = "model", from the same split
    seed             from the same split, the keys of examples/scheduling/dynamic.yaml as they are, but for the slots;
                     only where `--arms` names it

With `--no-share` a slot has no memory for two roles (`cluster.share_devices = false`): the collocated arm falls away,
and where a policy has all slots generate, those that train lend their devices, with the trainer's state in host memory.
Each slot says how many bytes of the trainer its device has then, and one byte ends the benchmark. Of the policies
`model` alone is measured, unless `--arms` names others: `model_no_offload` is `model` with `cluster.enable_offload =
false`, where slots change roles by resizes alone.

Arms alternate over `--rounds`, or until the budget ends; figures are medians of the rounds. `wall_s` is from the first
step's start to the last one's end; starting and stopping the processes is not in it. `cpu_s` is of all processes, from
start to stop.

    python benchmarks/elastic.py
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import yaml

from budget import Budget, CannotGoOn, arguments
from peers.long_tail import make
from provenance import provenance, write

SEED = Path(__file__).parents[1] / "examples/scheduling/dynamic.yaml"


def seed_keys() -> dict[str, object]:
    """What the seed's file says of `cluster`, but for its eight slots."""
    keys: dict[str, object] = yaml.safe_load(SEED.read_text())["cluster"]
    return {name: value for name, value in keys.items() if name != "component_placement"}


DYNAMIC: dict[str, dict[str, object]] = {
    "rules": {"auto_scheduler": True, "policy": "rules"},
    "rules_policies": {
        "auto_scheduler": True,
        "policy": "rules",
        "use_pre_process_policy": True,
        "use_wait_before_last_iter_policy": True,
    },
    "model": {"auto_scheduler": True, "policy": "model"},
    "model_no_offload": {"auto_scheduler": True, "policy": "model", "enable_offload": False},
    "seed": seed_keys(),
}
NO_SHARE: dict[bool, dict[str, object]] = {False: {}, True: {"share_devices": False}}
RACE = 1.1
"""A split that took so much longer than the best one of a round is not the best by bad luck."""
STOLEN = 7
"""In `_cores`."""
IN_TURNS = {"auto_scheduler": True, "policy": "ductile.core.scheduling.policies.static.InTurns"}


@dataclass(frozen=True)
class Arm:
    name: str
    cluster: dict[str, Any]
    """The config's section, without the slots' share of a core."""


@dataclass(frozen=True)
class Lent:
    """The trainer's slots lent their devices, and got them back."""

    park_s: float
    unpark_s: float
    num_bytes: int
    """Bytes in host memory meanwhile."""
    device_bytes: int
    """Bytes of the trainer on the devices at either end of that time."""


@dataclass(frozen=True)
class Outcome:
    wall_s: float
    step_s: list[float]
    cpu_s: float
    tokens: int
    reward: float
    """Mean of the last three steps."""
    longest_by_median: float
    idle_by_cause: dict[str, float]
    """Share of all slots' time."""
    switch_share: float
    """Of all slots' time; `deciding_share` is of the run's, by the orchestrator."""
    deciding_share: float
    num_switches: int
    lent: list["Lent"]
    """Times when slots lent their devices, in order."""
    stolen: float
    """Share of all cores' time, from start to stop, that the machine's host gave to somebody else."""


def split(num_train: int, num_slots: int) -> Arm:
    train, generate = _range(0, num_train), _range(num_train, num_slots)
    return Arm(split_name(num_train), {"component_placement": {"actor": train, "rollout": generate}})


def split_name(num_train: int) -> str:
    return f"static, {num_train} train"


def collocated(num_slots: int) -> Arm:
    return Arm("collocated", {"component_placement": {"actor,rollout": _range(0, num_slots)}, **IN_TURNS})


def elastic(name: str, home: int, num_slots: int) -> Arm:
    """A policy, from a split."""
    return Arm(name, {**split(home, num_slots).cluster, **DYNAMIC[name]})


def _range(first: int, end: int) -> str:
    return f"{first}-{end - 1}" if end - first > 1 else str(first)


def run(arm: Arm, args: argparse.Namespace, work: Path, budget: Budget) -> Outcome:
    folder = work / "run"
    config = {
        "output_dir": str(folder),
        "clean": True,
        "max_steps": args.steps,
        "model": {"name": str(work / "model")},
        "cluster": {"cpu_slot_fraction": args.fraction, **NO_SHARE[args.no_share], **arm.cluster},
        "trainer": {
            "model": {"seq_len": args.seq_len},
            "optim": {"lr": args.lr},
            "loss": {"type": "grpo"},
        },
        "inference": {"max_num_seqs": args.max_num_seqs, "model": {"max_model_len": args.max_tokens + 32}},
        "orchestrator": {
            "batch_size": args.batch,
            "rollouts_per_example": args.group,
            "max_async_level": 0,
            "drop_zero_advantage": False,
            "sampling": {"max_tokens": args.max_tokens, "seed": 1},
            "eval": {"enabled": False},
            "task": {"type": "jsonl", "path": str(work / "prompts.jsonl"), "reward": f"{work / 'reward.py'}:reward"},
        },
        "ckpt": {"export_model": False},
    }
    path = work / "rl.toml"
    path.write_text(tomli_w.dumps(config))
    before, used_s = _cores(), _children_s()
    budget.run([sys.executable, "-m", "ductile", "rl", "@", str(path)])
    spent = [after - start for after, start in zip(_cores(), before, strict=True)]
    return outcome(folder, _children_s() - used_s, spent[STOLEN] / sum(spent), args.steps)


def _children_s() -> float:
    """CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cores() -> list[int]:
    """Clock ticks of all cores so far: user, nice, system, idle, iowait, irq, softirq, steal (proc(5))."""
    return [int(ticks) for ticks in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]


def outcome(folder: Path, cpu_s: float, stolen: float, num_steps: int) -> Outcome:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    if len(steps) != num_steps:
        raise CannotGoOn(f"the run has {len(steps)} steps, not {num_steps}")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    lengths = [length for event in events if event["kind"] == "profile" for length in event["lengths"]]
    summary = json.loads((folder / "summary.json").read_text())
    return Outcome(
        wall_s=sum(row["step_s"] for row in steps),
        step_s=[row["step_s"] for row in steps],
        cpu_s=cpu_s,
        tokens=round(sum(row["sampled_tokens"] for row in steps)),
        reward=statistics.mean(row["reward_mean"] for row in steps[-3:]),
        longest_by_median=max(lengths) / statistics.median(lengths),
        idle_by_cause=summary["idle_by_cause"],
        switch_share=summary["switch_share"],
        deciding_share=summary["deciding_share"],
        num_switches=summary["num_switches"],
        lent=lent_in(events),
        stolen=stolen,
    )


def lent_in(events: list[dict[str, Any]]) -> list[Lent]:
    """Raises CannotGoOn where a byte of the trainer was on a device that was lent, or lending has failed."""
    failures = [failure for event in events if event["kind"] == "switched" for failure in event["failures"]]
    if failures or any(event["kind"] == "policy_failed" for event in events):
        raise CannotGoOn(f"a change was not done: {'; '.join(failures) or 'the policy failed'}")
    moved = [event for event in events if event["kind"] == "parked"]
    pairs = list(zip(moved[::2], moved[1::2], strict=True))
    lent = [
        Lent(there["seconds"], back["seconds"], there["num_bytes"], there["device_bytes"] + back["device_bytes"])
        for there, back in pairs
    ]
    if any(not each.num_bytes or each.device_bytes for each in lent):
        raise CannotGoOn(f"devices that were lent held bytes of the trainer: {lent}")
    return lent


def summarised(outcomes: list[Outcome]) -> dict[str, Any]:
    causes = sorted({cause for each in outcomes for cause in each.idle_by_cause})
    return {
        "wall_s": statistics.median(each.wall_s for each in outcomes),
        "wall_s_rounds": [each.wall_s for each in outcomes],
        "step_s": statistics.median(step_s for each in outcomes for step_s in each.step_s),
        "cpu_s": statistics.median(each.cpu_s for each in outcomes),
        "tokens_per_s": statistics.median(each.tokens / each.wall_s for each in outcomes),
        "tokens": [each.tokens for each in outcomes],
        "idle_by_cause": {
            cause: statistics.median(each.idle_by_cause.get(cause, 0.0) for each in outcomes) for cause in causes
        },
        "num_switches": statistics.median(each.num_switches for each in outcomes),
        "switch_share": statistics.median(each.switch_share for each in outcomes),
        "deciding_share": statistics.median(each.deciding_share for each in outcomes),
        "num_lent": statistics.median(len(each.lent) for each in outcomes),
        "lent": [
            {
                "park_s": each.park_s,
                "unpark_s": each.unpark_s,
                "bytes": each.num_bytes,
                "device_bytes": each.device_bytes,
            }
            for outcome in outcomes
            for each in outcome.lent
        ],
        "reward_last": [each.reward for each in outcomes],
        "longest_by_median": statistics.median(each.longest_by_median for each in outcomes),
        "stolen_rounds": [each.stolen for each in outcomes],
    }


def alternate(args: argparse.Namespace, work: Path, budget: Budget) -> tuple[int, dict[str, list[Outcome]]]:
    """The train slots that the policies begin with, and the outcomes of each arm."""
    splits = {split_name(count): count for count in args.splits}
    found: dict[str, list[Outcome]] = {}
    home = args.splits[0]
    for number, name in budget.turns([*splits, *args.arms], args.rounds):
        tried = {count: found[each][0].wall_s for each, count in splits.items() if each in found}
        if name not in splits and tried:
            home = min(tried, key=lambda count: tried[count])
        elif number and tried[splits[name]] > RACE * min(tried.values()):
            continue
        with budget.turn_of(name):
            done = run(arm_of(name, splits, home, args.slots), args, work, budget)
            found.setdefault(name, []).append(done)
            print(
                f"round {number}  {name:16s} {done.wall_s:6.1f} s  {done.num_switches} switches "
                f"({done.switch_share:.1%})  reward {done.reward:.3f}  stolen {done.stolen:.0%}",
                flush=True,
            )
    return home, found


def arm_of(name: str, splits: dict[str, int], home: int, num_slots: int) -> Arm:
    if name in splits:
        return split(splits[name], num_slots)
    return collocated(num_slots) if name == "collocated" else elastic(name, home, num_slots)


def against(arm: str, figures: dict[str, dict[str, Any]]) -> dict[str, float]:
    """By other arm, the share of its time that this one takes more."""
    if arm not in figures:
        return {}
    wall_s = {name: figure["wall_s"] for name, figure in figures.items()}
    return {name: wall_s[arm] / other_s - 1 for name, other_s in wall_s.items() if name != arm}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="in the first one nothing is measured that policies go by")
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--fraction", type=float, default=0.25, help="of a core, for each slot")
    parser.add_argument("--splits", type=int, nargs="+", default=[2, 3, 4], help="train slots of the static arms")
    arms = ["collocated", "model", "rules", "rules_policies"]
    further = ["seed", "model_no_offload"]
    parser.add_argument("--arms", nargs="+", choices=[*arms, *further], help="beside the splits")
    parser.add_argument("--no-share", action="store_true", help="slots have no memory for two roles")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=640)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()
    if args.arms is None:
        args.arms = ["model"] if args.no_share else arms
    if args.no_share and "collocated" in args.arms:
        raise SystemExit("collocated: with --no-share a slot has no memory for two roles")
    budget = Budget(args.budget)

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        try:
            make(work, budget.run, hidden=args.hidden, num_layers=args.layers, max_tokens=args.max_tokens)
        except (CannotGoOn, TimeoutError) as reason:
            raise SystemExit(f"There is no model to measure with: {str(reason) or 'the time was over'}.") from None
        home, outcomes = alternate(args, work, budget)

    figures = {name: summarised(found) for name, found in outcomes.items()}
    splits = {str(count): figures.pop(name) for count in args.splits if (name := split_name(count)) in figures}
    best = min(splits, key=lambda count: splits[count]["wall_s"], default=None)
    if best:
        figures = {"static": splits[best], **figures}
    result = {
        "arms": figures,
        "switch_share": figures["model"]["switch_share"] if "model" in figures else None,
        "train_slots": {"static": best and int(best), "policies": home},
        "splits": splits,
        "model_against": against("model", figures),
        "seed_against": against("seed", figures),
        "settings": {key: value for key, value in vars(args).items() if key != "json"},
        **budget.told,
        **provenance("ductile", "torch"),
    }
    for name, figure in {**{f"{count} train": found for count, found in splits.items()}, **figures}.items():
        print(f"{name:16s} {figure['wall_s']:7.1f} s  {figure['tokens_per_s']:6.0f} tokens/s", end="  ")
        print(f"switches {figure['num_switches']:.0f} ({figure['switch_share']:.1%})", end="  ")
        print(f"deciding {figure['deciding_share']:.2%}")
    write(args.json, result)


if __name__ == "__main__":
    main()
