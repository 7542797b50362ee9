"""Every benchmark of the CPU, one after the other, each to this machine's file in `results/`; then the tables of README
and docs.

    make figures                              # which is the next line, with what it needs
    python benchmarks/run_all.py                  # needs `pip install -e .[bench]`
    python benchmarks/run_all.py generate plan    # only these

For a quiet machine: nothing else may run beside it, for at most two hours. Figures are of a commit, so what is
not committed yet keeps it from beginning. A benchmark that fails, or is still at work a minute after its budget, leaves
its file as it was, and is told at the end.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from provenance import commit, results_file

ROOT = Path(__file__).parents[1]
BENCHMARKS = {
    "generate": 180,
    "grpo_step": 540,
    "train": 540,
    "reshard": 480,
    "resize": 480,
    "role_changes": 540,
    "plan": 180,
    "decisions": 420,
    "orchestrator": 180,
    "schedules": 480,
    "elastic": 540,
    "publish": 540,
    "memory": 540,
}
"""In this order. Seconds after which a benchmark ends with what it has."""
APART = {
    "gpu": "gpu",
    "real": "real",
    "role_changes_smollm2": "role_changes",
    "elastic_no_share": "elastic",
}
"""Scripts by the files that another command writes: `make gpu`, where there is a GPU, `make real`, role_changes.py with
its `--model`, and elastic.py with `--no-share`."""
GRACE_S = 60.0
"""Past its budget a benchmark still ends its processes and writes its file; then it is killed."""


def command(name: str) -> list[str]:
    file = results_file(name).relative_to(ROOT)
    return [f"benchmarks/{name}.py", "--budget", str(BENCHMARKS[name]), "--json", str(file)]


def run(words: Sequence[str], limit_s: float) -> str:
    """Returns what went wrong, or nothing. What is not done in time is killed, with all that it started."""
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, start_new_session=True)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"{words[0]} was still at work after {limit_s:g} s, and was killed"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"{words[0]} ended with {process.returncode}" if process.returncode else ""


def asked(arguments: Sequence[str] | None = None) -> list[str]:
    """Those that the command line names, in the order of `BENCHMARKS`; all, if it names none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # Without `choices`: argparse in Python 3.11 holds no names at all against them, too.
    parser.add_argument("names", nargs="*", metavar="name", help=f"only these of: {', '.join(BENCHMARKS)}")
    names = parser.parse_args(arguments).names
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"there is no benchmark named {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    return [name for name in BENCHMARKS if name in names or not names]


def main() -> int:
    names = asked()
    if "+" in (at := commit()):
        raise SystemExit(f"the tree is {at}: commit first, as figures are of a commit")
    began_s, took_s, failures = time.monotonic(), dict[str, float](), list[str]()
    for name in names:
        since_s, words = time.monotonic(), command(name)
        print(f"== {name}: {shlex.join(words)}", flush=True)
        if failure := run(words, BENCHMARKS[name] + GRACE_S):
            print(f"== {failure}", flush=True)
            failures.append(failure)
        took_s[name] = time.monotonic() - since_s
    if failure := run(["benchmarks/figures.py", "--write"], GRACE_S):
        failures.append(failure)
    told = ["", *(f"{name:16}{seconds / 60:6.1f} minutes" for name, seconds in took_s.items())]
    print(*told, f"{'all':16}{(time.monotonic() - began_s) / 60:6.1f} minutes", *failures, sep="\n== ")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
