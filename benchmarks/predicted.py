"""Predicted seconds of a step beside those that were measured: `ductile plan`, held against real runs.

FOLDER/round_N/ARM is a run (`benchmarks/elastic.py --keep FOLDER` leaves them). Each arm in turn is the only one that
is known: lengths, speeds and costs come from its recording, all arms are simulated with them, on their placements and
with their policies. Its own arm is predicted too, but is not held out. What is predicted and what was measured are both
medians of the rounds; how far off one recording alone can be is told besides.

    python benchmarks/predicted.py --runs FOLDER --json benchmarks/results/predicted.json
"""

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

from ductile.sim.plan import case_of
from ductile.sim.recording import Recording, read_recording
from provenance import provenance, write

TIE = 0.03
"""Arms whose measured steps differ by less are not told apart by the machine either."""


Rounds = list[Recording]
"""The runs of one arm."""


def recorded(runs: Path) -> dict[str, Rounds]:
    """Finished runs, by their arms' names."""
    arms: dict[str, Rounds] = {}
    for file in sorted(runs.glob("round_*/*/summary.json")):
        arms.setdefault(file.parent.name, []).append(read_recording(file.parent))
    return arms


def measured(rounds: Rounds) -> float:
    """Seconds of a step."""
    return statistics.median(run.step_s for run in rounds)


def predicted(source: Rounds, arms: dict[str, Rounds]) -> dict[str, list[float]]:
    """Seconds of a step of each arm, by each of the recordings of one arm."""
    return {name: [case_of(run, rounds[0].setting).step_s for run in source] for name, rounds in arms.items()}


def wrong_pairs(said_s: dict[str, float], measured_s: dict[str, float]) -> list[dict[str, Any]]:
    """Arms that are predicted in the other order than they were measured, ties left out."""
    pairs = itertools.combinations(sorted(measured_s, key=lambda name: measured_s[name]), 2)
    return [
        {"faster": fast, "slower": slow, "measured": measured_s[slow] / measured_s[fast] - 1}
        for fast, slow in pairs
        if said_s[fast] > said_s[slow] and measured_s[slow] > (1 + TIE) * measured_s[fast]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="a folder of rounds of runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sources", nargs="*", help="arms to predict from, by their folders' names; all, if left out")
    asked = parser.parse_args()
    arms = recorded(asked.runs)
    if strangers := {*(asked.sources or ())} - arms.keys():
        raise SystemExit(f"{asked.runs} has no finished run {', '.join(sorted(strangers))}, but {', '.join(arms)}")
    if len(arms) < 2:
        raise SystemExit(f"{asked.runs} has finished runs of {len(arms)} arms, and a comparison needs two")
    measured_s = {name: measured(rounds) for name, rounds in arms.items()}
    print(f"rounds: {', '.join(f'{name} {len(found)}' for name, found in arms.items())}")
    width = max(10, *map(len, arms)) + 2
    print(f"{'predicted from':{width}}" + "".join(f"{name:>{width}}" for name in arms))
    print(f"{'measured':{width}}" + "".join(f"{seconds:>{width - 2}.2f} s" for seconds in measured_s.values()))
    rows: dict[str, Any] = {}
    for source in asked.sources or arms:
        each_s = predicted(arms[source], arms)
        said_s = {name: statistics.median(found) for name, found in each_s.items()}
        errors = {name: said_s[name] / measured_s[name] - 1 for name in arms}
        held_out = [abs(error) for name, error in errors.items() if name != source]
        rows[source] = {
            "predicted_s": said_s,
            "errors": errors,
            "worst_held_out": max(held_out),
            "median_held_out": statistics.median(held_out),
            "worst_of_one_recording": max(
                abs(seconds / measured_s[name] - 1) for name in arms if name != source for seconds in each_s[name]
            ),
            "wrong_pairs": wrong_pairs(said_s, measured_s),
        }
        print(f"{source:{width}}" + "".join(f"{error:>+{width}.1%}" for error in errors.values()), flush=True)
    for source, row in rows.items():
        wrong = "; ".join(
            f"{pair['faster']} is faster than {pair['slower']} by {pair['measured']:.0%}" for pair in row["wrong_pairs"]
        )
        worst = f"{row['worst_held_out']:.1%} at worst ({row['worst_of_one_recording']:.1%} from one recording alone)"
        print(f"{source}: held out, {worst}; order wrong: {wrong or 'nowhere'}")
    result = {
        "rounds": {name: len(found) for name, found in arms.items()},
        "measured_s": measured_s,
        "predicted_from": rows,
        "tie": TIE,
        **provenance("numpy"),
    }
    write(asked.json, result)


if __name__ == "__main__":
    main()
