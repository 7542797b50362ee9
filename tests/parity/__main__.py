"""python -m tests.parity meshes|resizes|knobs [WORDS]: a table of all checks, and exit code 1 when one fails.

With words, only the checks that have each of them in their name or model: `python -m tests.parity meshes qwen3 tp=2`.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.parity.checks import Check
from tests.parity.harness import Harness
from tests.parity.plan import checkpoint_checks, knob_checks, mesh_checks, resize_checks
from tests.parity.rows import Row, header, summary

TABLES = {
    "meshes": {"Meshes against one device": mesh_checks},
    "resizes": {
        "Resized in the middle of a batch": resize_checks,
        "Saved on one, loaded on another": checkpoint_checks,
    },
    "knobs": {"Knobs of memory against one device without any": knob_checks},
}

NUM_TRACEBACKS = 3
"""Of the first rows that failed without a value."""


def main(which: str, words: Sequence[str]) -> int:
    began_s = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, Harness(Path(folder)) as harness:
        for title, checks in TABLES[which].items():
            rows += _table(title, [check for check in checks() if _has(check, words)], harness)
    for row in [row for row in rows if row.traceback][:NUM_TRACEBACKS]:
        print(f"\n{row.name}, {row.model}:\n{row.traceback}")
    print(f"\n{summary(rows)}; {time.monotonic() - began_s:.0f} s")
    num_failed = sum(row.verdict == "FAIL" for row in rows)
    print(f"{len(rows) - num_failed} passed" + f", {num_failed} failed" * bool(num_failed))
    return int(num_failed > 0)


def _table(title: str, checks: Sequence[Check], harness: Harness) -> list[Row]:
    rows: list[Row] = []
    width = max(len(str(check)) for check in checks) if checks else 0
    print(f"\n{title}\n")
    for check in checks:
        row = check.run(harness)
        if row.values and not any(earlier.values for earlier in rows):
            print(header(row.values, width))
        print(row.line(width), flush=True)
        rows.append(row)
    return rows


def _has(check: Check, words: Sequence[str]) -> bool:
    return all(word in f"{check} {check.model}" for word in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
