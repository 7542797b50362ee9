"""Where a figure comes from: machine, versions, commit, command. Every benchmark writes it into its JSON, whose file is
named after the machine.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ductile.host import cpu_name, num_cores

RESULTS = Path(__file__).with_name("results")


def provenance(*packages: str) -> dict[str, object]:
    """`packages` are the distributions whose versions matter for the figure. In a copy of the tree the variable
    `GIT_COMMIT` says which commit it is."""
    return {
        "machine": {"cpu": cpu_name(), "cores": num_cores(), "platform": platform.platform()},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
        "commit": commit(),
        "command": " ".join(["python", *map(_quoted, sys.argv)]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """What `GIT_COMMIT` says, taken at its word; else git's commit, with "+changes" when what is measured, or what
    measures it, differs from it."""
    if given := os.environ.get("GIT_COMMIT"):
        return given[:12]
    root = Path(__file__).parents[1]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    measured = ("src", "benchmarks", ":(exclude)benchmarks/results")
    try:
        changed = git("status", "--porcelain", "--", *measured)
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def results_file(benchmark: str, device: str = "", count: int = 0) -> Path:
    """`results/<benchmark>/<cpu>-<cores>.json`, of this machine; another device, such as a GPU, may be what counts."""
    words = re.sub(r"[^a-z0-9]+", "-", (device or cpu_name()).lower()).strip("-")
    return RESULTS / benchmark / f"{words}-{count or num_cores()}.json"


def write(file: Path | None, figures: Mapping[str, object], indent: int = 2) -> None:
    """A benchmark's figures, with their provenance, to the file that `--json` says, if it says one."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(figures, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def _quoted(word: str) -> str:
    """The word as a shell reads it, with the home folder as `~`, which is not everybody's business."""
    home = str(Path.home())
    return "~" + shlex.quote(word.removeprefix(home)) if word.startswith(f"{home}/") else shlex.quote(word)


def _version(package: str) -> str | None:
    """None for what is not installed: ductile itself may only be on the path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
