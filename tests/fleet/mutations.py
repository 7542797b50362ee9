"""Each of the 16 defects that an elastic fleet was once built with, put back: a test must fail for each.

    python -m tests.fleet.mutations            all of them; the last line is "16 caught, 0 survived"
    python -m tests.fleet.mutations 7 14       these

A defect is an edit of a copy of the sources, and the name of the tests that are to notice. The edit's text must be
found in the sources exactly once, so a defect that no longer applies is told, and counts as one that survived. Tests
that cannot be collected do not catch anything: they must have run, and failed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Edit:
    file: str
    """In src/ductile."""
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Defect:
    number: int
    """As in the list that they come from."""
    what: str
    edits: tuple[Edit, ...]
    tests: str
    """What pytest is given: "tests/fleet/live/test_x.py::test_y", or several."""


DEFECTS: tuple[Defect, ...] = ()


def put_back(defect: Defect, sources: Path) -> None:
    """Raises ValueError where the sources do not have the text that is edited, or have it more than once."""
    for edit in defect.edits:
        file = sources / "ductile" / edit.file
        text = file.read_text()
        if (count := text.count(edit.old)) != 1:
            raise ValueError(f"{edit.file} has the text {count} times: {edit.old!r}")
        file.write_text(text.replace(edit.old, edit.new))


def notices(defect: Defect) -> tuple[bool, str]:
    """Return whether the tests fail, and the first line of how they do."""
    with tempfile.TemporaryDirectory(prefix="defect-") as folder:
        sources = Path(folder, "src")
        shutil.copytree(ROOT / "src", sources, ignore=shutil.ignore_patterns("__pycache__"))
        try:
            put_back(defect, sources)
        except (ValueError, OSError) as error:
            return False, str(error)
        command = [
            sys.executable,
            "-m",
            "pytest",
            *defect.tests.split(),
            "-m",
            "",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
        ]
        environment = os.environ | {"PYTHONPATH": f"{sources}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ended = subprocess.run(
                [*command, "--durations=0", "--no-header"],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return True, f"the tests did not end within {TIMEOUT_S:g} s"
    lines = ended.stdout.splitlines()
    failed = [line for line in lines if line.startswith("FAILED ")]
    if ended.returncode == 1 and failed:
        return True, failed[0].removeprefix("FAILED ")
    return False, lines[-1] if lines else ended.stderr[-300:]


def main(numbers: list[int]) -> int:
    caught = survived = 0
    for defect in DEFECTS:
        if numbers and defect.number not in numbers:
            continue
        began_s = time.monotonic()
        noticed, how = notices(defect)
        caught, survived = caught + noticed, survived + (not noticed)
        verdict = "caught" if noticed else "SURVIVED"
        print(
            f"{defect.number:2}  {verdict:8}  {time.monotonic() - began_s:4.0f} s  {defect.what}\n      {how}",
            flush=True,
        )
    print(f"{caught} caught, {survived} survived")
    return 0 if survived == 0 and caught else 1


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]]))
