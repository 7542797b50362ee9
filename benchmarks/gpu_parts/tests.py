"""The tests marked `gpu`, in the files that have one."""

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_parts.part import Failed, Setting, Skipped

ROOT = Path(__file__).parents[2]
NEEDED = ("pytest", "hypothesis")
"""What the tests import besides what ductile does."""


def run(setting: Setting) -> dict[str, Any]:
    if setting.device != "cuda":
        raise Skipped("the tests marked gpu need a CUDA device")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise Skipped(f"the tests need {' and '.join(missing)}, not installed for {sys.executable}")
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junitxml={report}"]
        options += ["-W", "default"]  # another torch may warn of something else
        done = subprocess.run([sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, check=False)
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode} and left no report")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    outcomes = {f"{case.get('classname')}::{case.get('name')}": outcome_of(case) for case in cases}
    failed = [name for name, outcome in outcomes.items() if outcome == "failed"]
    num_passed = list(outcomes.values()).count("passed")
    sentence = f"{num_passed} of {len(outcomes)} passed" + (f"; failed: {', '.join(failed)}" if failed else "")
    figures = {"outcomes": outcomes, "sentence": sentence}
    if failed or not num_passed:
        raise Failed(sentence, figures)
    return figures


def outcome_of(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"
