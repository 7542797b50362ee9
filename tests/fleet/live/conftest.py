"""One tiny model for all tests with real servers, and the truth about its versions."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.live.reference import Versions
from tests.fleet.live.rig import NAMES, Rig
from tests.fleet.live.servers import Servers
from tests.tiny import make_hf_model, make_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="session")
def truth(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Versions 0 to 4, which servers are given by hand."""
    truth = Versions(make_hf_model())
    truth.add(0, model)
    for version in range(1, 5):
        truth.make(version, model, tmp_path_factory.mktemp("versions") / str(version))
    return truth


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("servers")
    before, os.environ["XDG_RUNTIME_DIR"] = os.environ.get("XDG_RUNTIME_DIR"), str(folder)
    servers = Servers(model, folder, f"of-{folder.name}")
    yield servers
    servers.close()
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before


@pytest.fixture(scope="module")
def rig(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    truth = Versions(make_hf_model())
    truth.add(0, model)
    before = os.environ.get("XDG_RUNTIME_DIR")
    rig = Rig(model, truth, tmp_path_factory.mktemp("rig"))
    rig.open(*NAMES)
    yield rig
    rig.close()
    os.environ.pop("XDG_RUNTIME_DIR")
    if before is not None:
        os.environ["XDG_RUNTIME_DIR"] = before
