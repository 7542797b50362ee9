"""A server process as a member of a fleet: weights come over HTTP while it answers, all or nothing."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import Tensor

from ductile.generator.server.control_token import token_file
from ductile.model.checkpoint import load_model
from tests.generator.conftest import Family, request, run
from tests.generator.test_serve import server
from tests.generator.weight_giver import Giver, perturbed


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def process(
    qwen3: Family, faults: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    patch = pytest.MonkeyPatch()
    patch.setenv("DUCTILE_FAULTS", str(faults))
    patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
    with server(qwen3.folder, tmp_path_factory.mktemp("server")) as (url, process):
        yield url, process
    patch.undo()


@pytest.fixture(scope="module")
def client(process: tuple[str, Any]) -> Iterator[httpx.Client]:
    url = process[0]
    token = json.loads(token_file("127.0.0.1", int(url.rpartition(":")[2])).read_text())["token"]
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def weights(qwen3: Family) -> dict[str, Tensor]:
    return {name: each.data for name, each in load_model(qwen3.folder).named_parameters()}


def state(client: httpx.Client) -> Any:
    return client.get("/fleet/state").json()


def next_version(client: httpx.Client, weights: dict[str, Tensor], **settings: Any) -> Giver:
    said = state(client)
    version = said["version"] + 1
    return Giver(client, perturbed(weights, version), version, epoch=said["epoch"] + 1, **settings)


def test_a_whole_update_changes_what_is_sampled(
    client: httpx.Client, weights: dict[str, Tensor], qwen3: Family
) -> None:
    before = state(client)
    giver = next_version(client, weights, senders=2)
    giver.give()
    after = state(client)
    assert (after["version"], after["digest"]) == (giver.version, giver.digest)
    assert after["incarnation"] == before["incarnation"]
    assert client.get("/weights/digest").json() == {"version": giver.version, "digest": giver.digest}
    engine = qwen3.engine()
    engine.load_weights(giver.tensors, giver.version)
    expected = run(engine, [request("r", "hello", 12)])["r"]
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    said = client.post("/v1/completions", json=body).json()
    assert tuple(said["choices"][0]["token_ids"]) == expected.token_ids
    assert said["choices"][0]["weight_versions"] == [[giver.version, giver.digest, 12]]
    assert said["incarnation"] == after["incarnation"]
