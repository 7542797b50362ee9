"""The tests marked `gpu`, in the files that have one."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from gpu_parts.part import Failed, Setting, Skipped

ROOT = Path(__file__).parents[2]
NEEDED = ("pytest", "hypothesis")
"""What the files of tests import besides what ductile does. Tests that need more skip themselves."""
SPARE_S = 15.0
"""Of this part's time, for pytest to end in after its own is over."""

Outcome = Literal["passed", "failed", "skipped", "unfinished"]


def run(setting: Setting) -> dict[str, Any]:
    if setting.device != "cuda":
        raise Skipped("the tests marked gpu need a CUDA device")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise Skipped(f"the tests need {' and '.join(missing)}, not installed for {sys.executable}")
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    return figures_of(outcomes(ROOT, files, setting.deadline_s - SPARE_S))


def outcomes(root: Path, files: Sequence[str], deadline_s: float) -> dict[str, Outcome]:
    """What became of each test, also when pytest has not ended in time, or has died."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "outcomes"
        said.touch()
        options = ["-m", "gpu", "-p", "no:cacheprovider", "-p", "gpu_parts.outcomes"]
        options += ["--continue-on-collection-errors", "-W", "default"]  # another torch may warn of something else
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OUTCOMES": str(said)}
        process = subprocess.Popen([sys.executable, "-m", "pytest", *options, *files], cwd=root, env=environment)
        end_in_time(process, deadline_s)
        return read(said.read_text())


def end_in_time(process: "subprocess.Popen[bytes]", deadline_s: float) -> None:
    """At the deadline it is interrupted, so that it ends its tests' processes and prints what failed; then killed."""
    for number, wait_s in ((signal.SIGINT, deadline_s), (signal.SIGKILL, SPARE_S / 2), (signal.SIGKILL, SPARE_S / 4)):
        try:
            process.wait(wait_s)
            return
        except subprocess.TimeoutExpired:
            process.send_signal(number)


def read(said: str) -> dict[str, Outcome]:
    """Of what `gpu_parts.outcomes` said. A test that fails when it is called and again after that has failed once."""
    found: dict[str, Outcome] = {}
    for line in said.splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # it died here
        told = json.loads(line)
        if "collected" in told:
            found |= dict.fromkeys(told["collected"], "unfinished")
        elif found.get(told["id"]) != "failed":
            found[told["id"]] = told["outcome"]
    return found


def figures_of(found: dict[str, Outcome]) -> dict[str, Any]:
    """Raises Failed, with the same figures, when a test has failed or is unfinished, and when none has passed."""
    by_outcome: dict[Outcome, list[str]] = {"passed": [], "failed": [], "unfinished": [], "skipped": []}
    for name, outcome in found.items():
        by_outcome[outcome].append(name)
    sentence = f"{len(by_outcome['passed'])} of {len(found)} passed"
    for outcome in ("failed", "unfinished"):
        if by_outcome[outcome]:
            sentence += f"; {outcome}: {', '.join(by_outcome[outcome])}"
    if by_outcome["skipped"]:
        sentence += f"; {len(by_outcome['skipped'])} skipped"
    figures = {"outcomes": found, "sentence": sentence}
    if by_outcome["failed"] or by_outcome["unfinished"] or not by_outcome["passed"]:
        raise Failed(sentence, figures)
    return figures
