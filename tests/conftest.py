"""What holds for all tests: how processes start (`tests.warm`), which worker runs what (`tests.balance`), how many
examples there are (`tests.nightly`), and one thread a process, as in the product's CPU workers.
"""

import multiprocessing.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.nightly import register_profiles

pytest_plugins = ["tests.balance"]

# Processes of a run import nothing from the current folder; roles of the tests' own are found like this.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))

# Benchmarks are scripts beside each other, and import each other by their names.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

torch.set_num_threads(1)
subprocess.Popen = warm.Popen
multiprocessing.util.spawnv_passfds = warm.spawnv_passfds
register_profiles()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cold", action="store_true", help="execute every process as a user does, none from a template")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cold"):
        subprocess.Popen = warm.EXECUTED
        multiprocessing.util.spawnv_passfds = warm.SPAWNED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def cold() -> Iterator[None]:
    """Every process of the test starts as a user's does."""
    with warm.cold():
        yield
