"""A server process as a member of a fleet: weights come over HTTP while it answers, all or nothing."""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

from ductile.messages.updates import TensorSpec
from ductile.model.attention import PackedAttention
from ductile.model.checkpoint import load_model
from tests.generator.conftest import Family, request, run
from tests.generator.test_serve import server
from tests.generator.weight_giver import Giver, perturbed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def process(qwen3: Family, folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUCTILE_FAULTS", str(folder))
        with server(qwen3.folder, folder, num_blocks=200) as (url, process):
            yield url, process


@pytest.fixture(scope="module")
def token_file(folder: Path, process: tuple[str, Any]) -> Path:
    return folder / "ductile" / "servers" / f"127.0.0.1-{process[0].rpartition(':')[2]}.json"


@pytest.fixture(scope="module")
def client(process: tuple[str, Any], token_file: Path) -> Iterator[httpx.Client]:
    token = json.loads(token_file.read_text())["token"]
    with httpx.Client(base_url=process[0], headers={"Authorization": f"Bearer {token}"}, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def weights(qwen3: Family) -> dict[str, Tensor]:
    return {name: each.data for name, each in load_model(qwen3.folder).named_parameters()}


@pytest.fixture
def give(client: httpx.Client, weights: dict[str, Tensor]) -> Callable[..., Giver]:
    def give(**settings: Any) -> Giver:
        """The next version at the next epoch."""
        said = state(client)
        version = said["version"] + 1
        return Giver(client, perturbed(weights, version), version, epoch=said["epoch"] + 1, **settings)

    return give


Give = Callable[..., Giver]


def state(client: httpx.Client) -> Any:
    return client.get("/fleet/state").json()


def complete(client: httpx.Client, **settings: Any) -> Any:
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    return client.post("/v1/completions", json=body | settings).json()


def test_a_whole_update_changes_what_is_sampled(client: httpx.Client, give: Give, qwen3: Family) -> None:
    before = state(client)
    giver = give(senders=2)
    giver.give()
    after = state(client)
    assert (after["version"], after["digest"]) == (giver.version, giver.digest)
    assert after["incarnation"] == before["incarnation"]
    assert client.get("/weights/digest").json() == {"version": giver.version, "digest": giver.digest}
    engine = qwen3.engine()
    engine.load_weights(giver.tensors, giver.version)
    expected = run(engine, [request("r", "hello", 12)])["r"]
    said = complete(client)
    assert tuple(said["choices"][0]["token_ids"]) == expected.token_ids
    assert said["choices"][0]["weight_versions"] == [[giver.version, giver.digest, 12]]
    assert said["incarnation"] == after["incarnation"]


def test_what_is_said_twice_has_the_same_reply(give: Give) -> None:
    giver = give()
    assert giver.prepare() == giver.prepare()
    num_buckets = len(giver.offers[0].buckets)
    first = giver.send(0, 0)
    assert giver.send(0, 0) == first
    giver.send_all()
    assert giver.send(0, 0)[1]["num_buckets"] == num_buckets
    for what, phase in (("verify", "verified"), ("commit", "committed")):
        assert giver.end(what) == giver.end(what) == (200, giver.end(what)[1] | {"phase": phase})
    assert giver.prepare()[1]["phase"] == giver.end("abort")[1]["phase"] == "committed"


def test_messages_of_the_past_and_of_other_updates_are_refused(client: httpx.Client, give: Give) -> None:
    giver, live = give(), state(client)
    assert giver.prepare()[0] == 200
    rival = Giver(client, giver.tensors, giver.version, epoch=giver.epoch)
    status, said = rival.prepare()
    assert status == 409
    assert "is under way" in said["error"]["message"]
    assert rival.send(0, 0)[0] == 409
    assert giver.send(0, 0, epoch=giver.epoch - 1)[0] == 409
    assert giver.send(0, 0, to=10_000)[0] == 422
    assert giver.end("commit")[0] == 409
    newer = Giver(client, giver.tensors, giver.version, epoch=giver.epoch + 1)
    assert newer.prepare()[0] == 200
    for late in (giver.send(0, 0), giver.end("verify"), giver.end("commit")):
        assert late[0] == 409
    status, said = giver.prepare()
    assert (status, said["phase"]) == (200, "aborted")
    assert newer.end("abort")[1]["phase"] == "aborted"
    assert Giver(client, giver.tensors, giver.version, epoch=giver.epoch).prepare()[0] == 409
    status, said = newer.end("commit")
    assert (status, said["phase"]) == (200, "aborted")
    assert state(client)["digest"] == live["digest"]


def test_another_model_is_refused_with_a_sentence(client: httpx.Client, give: Give) -> None:
    live = state(client)
    for change, sentence in (
        (lambda specs: (*specs, TensorSpec("other", "float32", (2,))), "it is of another model: other on one side"),
        (lambda specs: specs[1:], "it is of another model"),
        (lambda specs: (TensorSpec(specs[0].name, "float32", (3, 3)), *specs[1:]), "has shape [3, 3]"),
        (lambda specs: (TensorSpec(specs[0].name, "float64", specs[0].shape), *specs[1:]), "comes in float64"),
    ):
        giver = give()
        giver.retell(change)
        status, said = giver.prepare()
        assert (status, sentence in said["error"]["message"]) == (422, True), said
        assert giver.end("commit")[1]["phase"] == "failed"
    assert state(client)["digest"] == live["digest"]


def test_damaged_weights_never_become_live(client: httpx.Client, give: Give) -> None:
    live, said = state(client), complete(client)
    giver = give()
    giver.prepare()
    assert giver.send(0, 0, checksum="00000000")[0] == 422
    assert giver.send(0, 0, content=b"short")[0] == 422
    giver.send_all()
    assert giver.end("verify", digest="0" * 16)[1]["phase"] == "failed"
    status, said = giver.end("commit")
    assert (status, said["phase"]) == (200, "failed")
    assert f"has digest {giver.digest}, and not 0000000000000000" in said["reason"]
    assert client.get("/weights/digest").json() == {"version": live["version"], "digest": live["digest"]}
    give().give()


def test_a_delta_leaves_out_what_is_as_before(client: httpx.Client, give: Give) -> None:
    base = give()
    base.give()
    giver = give(settings={"base_version": base.version})
    name = next(iter(base.tensors))
    giver = Giver(
        client, {**base.tensors, name: giver.tensors[name]}, giver.version, giver.epoch, settings=giver.settings
    )
    giver.only(name)
    giver.give()
    assert client.get("/weights/digest").json() == {"version": giver.version, "digest": giver.digest}
    status, said = give(settings={"base_version": base.version}).prepare()
    assert status == 422
    assert f"says what changed since {base.version}, and {giver.version} is live here" in said["error"]["message"]


def test_every_token_of_streams_through_20_updates_is_of_the_version_that_it_says(
    client: httpx.Client, weights: dict[str, Tensor], qwen3: Family, process: tuple[str, subprocess.Popen[str]]
) -> None:
    live = state(client)
    committed = {live["version"]: live["digest"]}
    givers = [
        Giver(client, perturbed(weights, at), live["version"] + at, live["epoch"] + at, bucket_bytes=200_000)
        for at in range(1, 21)
    ]
    streams = ThreadPoolExecutor(3)
    body = {"temperature": 1, "max_tokens": 3000, "ignore_eos": True, "return_token_ids": True, "stream": True}
    text, chat = {"prompt": "hello", "logprobs": 0}, {"messages": [{"role": "user", "content": "hello"}]}
    ended = threading.Event()

    def stream(path: str, asked: Any) -> tuple[list[int], list[int], list[float], Any]:
        tokens, versions, logprobs, first = [], [], [], None
        with client.stream("POST", path, json=body | asked) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    said = json.loads(line[6:])
                    (choice,), first = said["choices"], first or said
                    assert said["incarnation"] == live["incarnation"]
                    tokens += choice.get("token_ids", [])
                    logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
                    for version, digest, count in choice.get("weight_versions", []):
                        assert committed[version] == digest  # told to commit by now
                        versions += [version] * count
                if ended.is_set():
                    break
        return tokens, versions, logprobs, first

    said = [streams.submit(stream, "/v1/completions", text | {"seed": seed}) for seed in range(1)]
    said.append(streams.submit(stream, "/v1/chat/completions", chat))
    before = usage(process[1].pid)
    for giver in givers:
        giver.stage()
        committed[giver.version] = giver.digest
        assert giver.end("commit")[1]["phase"] == "committed"
    after = usage(process[1].pid)
    ended.set()
    streamed = [future.result(60) for future in said]
    streams.shutdown()
    assert after["threads"] <= before["threads"] + 8  # those of pools
    assert after["files"] <= before["files"] + 2
    for tokens, versions, _, _ in streamed:
        assert len(tokens) == len(versions) > 20
        assert len(set(versions)) > 10
        assert versions == sorted(versions)
    tokens, versions, logprobs, first = streamed[0]
    prompt = first["prompt_token_ids"]
    model = load_model(qwen3.folder)
    for version in sorted(set(versions) - {live["version"]})[::3]:
        model.load_state_dict(givers[version - live["version"] - 1].tensors)
        expected = scored(model, [*prompt, *tokens])[-len(tokens) :]
        found = [(logprobs[at], expected[at]) for at in range(len(tokens)) if versions[at] == version]
        assert max(abs(a - b) for a, b in found) < 1e-3


def scored(model: nn.Module, tokens: list[int]) -> list[float]:
    """Log-probs of all tokens but the first, by the trainer's forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor(tokens), torch.arange(len(tokens)), PackedAttention([len(tokens)]))
    logprobs = logits.log_softmax(-1)
    return [logprobs[at - 1, tokens[at]].item() for at in range(1, len(tokens))]


def usage(pid: int) -> dict[str, int]:
    tasks, files = len(os.listdir(f"/proc/{pid}/task")), os.listdir(f"/proc/{pid}/fd")
    return {"threads": tasks, "files": len(files)}
