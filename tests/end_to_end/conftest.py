import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.end_to_end.runs import Run
from tests.tiny import make_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def start():
    """`start(config, *flags)` begins a life of a run; none outlives the test."""
    lives: list[Run] = []

    def begin(config: Path, *flags: str, **how: str) -> Run:
        lives.append(Run(config, *flags, **how))
        return lives[-1]

    yield begin
    for life in lives:
        life.close()


@pytest.fixture
def in_memory(tmp_path: Path):
    """A folder where fsync costs nothing, where there is one."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(prefix="ductile-tests-", dir=memory) as folder:
        yield Path(folder)
