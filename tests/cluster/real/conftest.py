"""What runs by SLURM and on Ray share: the runs that they are compared with, and the table of what took how long."""

from collections.abc import Iterator

import pytest

from tests.cluster.real.same_run import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("runs"))
    yield made
    print(made.table())
