"""Which worker runs which tests: the longest first, by what they took before. And which compiles which of them first.

A unit is what goes to a worker at once: a file, but for its long tests, each of which is one of its own.
`durations.json` has the seconds of units, and others count as a second; `make test PYTEST_FLAGS=--write-durations`
writes it.
Where it is out of date, a worker is idle for longer at the end, and nothing else is wrong.
"""

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
FILE = TESTS / "durations.json"
LONG_S = 2.0
"""Seconds from which on a test is a unit, unless it shares a fixture with others of its file."""
UNKNOWN_S = 1.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help=f"write the seconds of tests to {FILE.name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import the files of the whole suite, each worker from another one on: what one has compiled (with assertions that
    tell their values, which takes a quarter of a minute in all), the others find."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or [Path(path).resolve() for path in session.config.args] != [TESTS]:
        return
    modules = [".".join(file.relative_to(TESTS.parent).with_suffix("").parts) for file in TESTS.rglob("test_*.py")]
    first = len(modules) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    modules.sort()
    for module in (*modules[first:], *modules[:first]):
        with suppress(Exception, pytest.skip.Exception):  # the collection tells of it
            import_module(module)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.user_properties.append(("shares", _shares(item)))
    if hasattr(config, "workerinput"):
        units = durations()
        items.sort(key=lambda item: -units.get(unit_of(item.nodeid, units), UNKNOWN_S))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that hands out units in the order of the workers' tests (with `--no-loadscope-reorder`)."""
    from xdist.scheduler import LoadScopeScheduling

    units = durations()

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid, units)

    return Units(config, log)


def durations() -> dict[str, float]:
    """Seconds by unit."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def unit_of(nodeid: str, units: Mapping[str, float]) -> str:
    return nodeid if nodeid in units else nodeid.partition("::")[0]


def _shares(item: pytest.Item) -> bool:
    """Whether tests of its file have a fixture in common with it, which each worker would make anew."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    return any(found[-1].scope in ("module", "class", "package") for found in fixtures)


class _Recorder:
    def __init__(self) -> None:
        self._tests: Counter[str] = Counter()
        self._shared: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests[report.nodeid] += report.duration
        if dict(report.user_properties).get("shares"):
            self._shared.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        units: Counter[str] = Counter()
        for test, seconds in self._tests.items():
            units[test if seconds >= LONG_S and test not in self._shared else test.partition("::")[0]] += seconds
        kept = {unit: round(seconds, 1) for unit, seconds in sorted(units.items()) if seconds >= UNKNOWN_S / 2}
        FILE.write_text(json.dumps(kept, indent=1) + "\n")
