"""A plugin of pytest for the part `tests`: says what became of each test as soon as it is known.

Each line of the file that the variable `OUTCOMES` names is JSON: {"collected": [ids]} once, then {"id", "outcome"}. So
what has run is known however pytest ends.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    _say({"collected": [item.nodeid for item in session.items]})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported, or is skipped as a whole."""
    if report.outcome != "passed":
        _say({"id": report.nodeid, "outcome": report.outcome})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _say({"id": report.nodeid, "outcome": report.outcome})


def _say(what: dict[str, Any]) -> None:
    with Path(os.environ["OUTCOMES"]).open("a") as file:
        file.write(json.dumps(what) + "\n")
