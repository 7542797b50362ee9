"""Every benchmark but `gpu`, one after the other, each to its file in `results/`; then the tables of README and docs.

    make figures                              # which is the next line, with what it needs
    python benchmarks/run_all.py                  # needs `pip install -e .[bench]`
    python benchmarks/run_all.py generate plan    # only these

For a quiet machine: nothing else may run beside it, for some two and a half hours on two cores. Figures are of a
commit, so what is not committed yet keeps it from beginning. A benchmark that fails leaves its file as it was, and is
told at the end.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from provenance import commit

ROOT = Path(__file__).parents[1]
RUNS = "RUNS"
"""In the arguments: a folder in which `elastic` leaves its runs for `predicted`."""
BENCHMARKS: dict[str, str] = {
    "generate": "",
    "grpo_step": "",
    "train_step": "",
    "micro_steps": "",
    "reshard": "",
    "resize": "",
    "role_changes": "",
    "plan": "",
    "decisions": "",
    "orchestrator": "",
    "schedules": "",
    "published": "",
    "elastic": f"--keep {RUNS}",
    "predicted": f"--runs {RUNS}",
}
"""In this order, with these arguments besides `--json`."""
APART = frozenset({"gpu"})
"""Files that another command writes: `make gpu`, where there is a GPU."""
LONGEST_S = 3 * 3600.0
"""That any of them may take."""


def command(name: str, runs: str) -> list[str]:
    arguments = [runs if word == RUNS else word for word in shlex.split(BENCHMARKS[name])]
    return [f"benchmarks/{name}.py", *arguments, "--json", f"benchmarks/results/{name}.json"]


def run(name: str, runs: str) -> str:
    """Returns what went wrong, or nothing."""
    try:
        done = subprocess.run([sys.executable, *command(name, runs)], cwd=ROOT, timeout=LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{name} was still at work after {LONGEST_S / 3600:.0f} hours, and was ended"
    return f"{name} ended with {done.returncode}" if done.returncode else ""


def asked(arguments: Sequence[str] | None = None) -> list[str]:
    """Those that the command line names, in the order of `BENCHMARKS`; all, if it names none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # Without `choices`: argparse in Python 3.11 holds no names at all against them, too.
    parser.add_argument("names", nargs="*", metavar="name", help=f"only these of: {', '.join(BENCHMARKS)}")
    names = parser.parse_args(arguments).names
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"there is no benchmark named {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if "predicted" in names and "elastic" not in names:
        parser.error("predicted reads the runs that elastic leaves: name elastic, too")
    return [name for name in BENCHMARKS if name in names or not names]


def main() -> int:
    names = asked()
    if "+" in (at := commit()):
        raise SystemExit(f"the tree is {at}: commit first, as figures are of a commit")
    began_s, failures = time.monotonic(), list[str]()
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as runs:
        for name in names:
            since_s = time.monotonic()
            print(f"== {name}: {shlex.join(command(name, runs))}", flush=True)
            if failure := run(name, runs):
                failures.append(failure)
            print(f"== {name}: {(time.monotonic() - since_s) / 60:.1f} minutes", flush=True)
    written = subprocess.run([sys.executable, "benchmarks/figures.py", "--write"], cwd=ROOT, timeout=600, check=False)
    if written.returncode:
        failures.append("the tables of README and docs could not be made")
    print(f"== {(time.monotonic() - began_s) / 60:.0f} minutes", *failures, sep="\n== ")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
