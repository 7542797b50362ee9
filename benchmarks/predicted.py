"""Predicted seconds of a step beside those that were measured: `ductile plan`, held against real runs.

Every run in a folder is an arm (`benchmarks/elastic.py --keep FOLDER` leaves such a folder). Each in turn is the only
one that is known: lengths, speeds and costs come from its recording, and all arms are simulated with them, on their
placements and with their policies. Its own arm is predicted too, but is not held out.

    python benchmarks/predicted.py --runs FOLDER --json benchmarks/results/predicted.json
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from ductile.sim.plan import case_of
from ductile.sim.recording import Recording, read_recording
from provenance import provenance

TIE = 0.03
"""Arms whose measured steps differ by less are not told apart by the machine either."""


def predicted(source: Recording, arms: dict[str, Recording]) -> dict[str, float]:
    """Seconds of a step of each arm, by what one run has recorded."""
    return {name: case_of(source, arm.setting).step_s for name, arm in arms.items()}


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
    parser.add_argument("--runs", type=Path, required=True, help="a folder with the runs' folders in it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sources", nargs="*", help="runs to predict from, by their folders' names; all, if left out")
    asked = parser.parse_args()
    arms = {file.parent.name: read_recording(file.parent) for file in sorted(asked.runs.glob("*/summary.json"))}
    if strangers := {*(asked.sources or ())} - arms.keys():
        raise SystemExit(f"{asked.runs} has no finished run {', '.join(sorted(strangers))}, but {', '.join(arms)}")
    if len(arms) < 2:
        raise SystemExit(f"{asked.runs} has {len(arms)} finished runs, and a comparison needs two")
    measured_s = {name: arm.step_s for name, arm in arms.items()}
    width = max(10, *map(len, arms)) + 2
    print(f"{'predicted from':{width}}" + "".join(f"{name:>{width}}" for name in arms))
    print(f"{'measured':{width}}" + "".join(f"{seconds:>{width - 2}.2f} s" for seconds in measured_s.values()))
    rows: dict[str, Any] = {}
    for source in asked.sources or arms:
        said_s = predicted(arms[source], arms)
        errors = {name: said_s[name] / measured_s[name] - 1 for name in arms}
        held_out = [abs(error) for name, error in errors.items() if name != source]
        rows[source] = {
            "predicted_s": said_s,
            "errors": errors,
            "worst_held_out": max(held_out),
            "median_held_out": statistics.median(held_out),
            "wrong_pairs": wrong_pairs(said_s, measured_s),
        }
        print(f"{source:{width}}" + "".join(f"{error:>+{width}.1%}" for error in errors.values()), flush=True)
    for source, row in rows.items():
        wrong = "; ".join(
            f"{pair['faster']} is faster than {pair['slower']} by {pair['measured']:.0%}" for pair in row["wrong_pairs"]
        )
        print(f"{source}: held out, {row['worst_held_out']:.1%} at worst; order wrong: {wrong or 'nowhere'}")
    if asked.json:
        result = {"measured_s": measured_s, "predicted_from": rows, "tie": TIE, **provenance()}
        asked.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
