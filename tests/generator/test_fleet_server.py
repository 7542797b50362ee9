"""A server process as a member of a fleet: weights come over HTTP while it answers, all or nothing."""

import json
import os
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from fastapi.testclient import TestClient
from torch import Tensor, nn

from ductile.config.schema.inference import InferenceConfig, InferenceModelConfig, ServerConfig
from ductile.config.schema.run import RLConfig
from ductile.generator.engine.engine import Engine
from ductile.generator.server.runner import EngineFailed
from ductile.generator.server.server import create_app
from ductile.generator.server.weight_donor import content_of
from ductile.messages.control_token import ControlToken
from ductile.messages.updates import (
    Bucket,
    EndUpdate,
    EndVersionLease,
    Offer,
    PauseServer,
    PrepareUpdate,
    Receiver,
    ResumeServer,
    SendReport,
    TensorSpec,
    WeightCarrier,
    WeightUpdate,
)
from ductile.model.attention import PackedAttention
from ductile.model.checkpoint import load_model
from ductile.orchestrator.commands.servers import models_of
from ductile.weights.carriers.shared_memory import RingMemory
from ductile.weights.digest import box_digest
from ductile.weights.sender import WeightSender
from tests.generator.conftest import Family, request, run
from tests.generator.fault_points import FAULTS
from tests.generator.test_serve import server, wait_for
from tests.generator.weight_giver import Giver, perturbed

Client = httpx.Client | TestClient


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def process(qwen3: Family, folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULTS, str(folder))
        with server(qwen3.folder, folder, fault="points", num_blocks=200) as (url, process):
            yield url, process


@pytest.fixture(scope="module")
def token_file(folder: Path, process: tuple[str, Any]) -> Path:
    return folder / "ductile" / "servers" / f"127.0.0.1-{process[0].rpartition(':')[2]}.json"


@pytest.fixture(scope="module")
def client(process: tuple[str, Any], token_file: Path) -> Iterator[httpx.Client]:
    token = json.loads(token_file.read_text())["token"]
    with httpx.Client(base_url=process[0], headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
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


def state(client: Client) -> Any:
    return client.get("/fleet/state").json()


def read(client: Client) -> tuple[int, str]:
    """Version and digest, from the weights that are sampled from."""
    found = client.get("/weights/digest").json()
    return found["version"], found["digest"]


def complete(client: Client, **settings: Any) -> Any:
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    return client.post("/v1/completions", json=body | settings).json()


JSON = {"Content-Type": "application/json"}


def post(client: Client, path: str, said: msgspec.Struct) -> Any:
    reply = client.post(path, content=msgspec.json.encode(said), headers=JSON)
    assert reply.status_code == 200, reply.text
    return reply.json()


Fault = Callable[[str, str], None]


@pytest.fixture
def fault(folder: Path) -> Iterator[Fault]:
    """fault(point, what): have the server do so there; "": not any more."""

    def set(point: str, what: str) -> None:
        (folder / f"{point}.new").write_text(what)
        (folder / f"{point}.new").rename(folder / point)
        points.append(folder / point)

    points: list[Path] = []
    yield set
    for point in points:
        point.unlink(missing_ok=True)


def test_a_whole_update_changes_what_is_sampled(client: httpx.Client, give: Give, qwen3: Family) -> None:
    before = state(client)
    giver = give(senders=2)
    giver.give()
    after = state(client)
    assert (after["version"], after["digest"]) == (giver.version, giver.digest)
    assert after["incarnation"] == before["incarnation"]
    found = client.get("/weights/digest").json()
    assert (found["version"], found["digest"], found["announced"]) == (giver.version, giver.digest, giver.digest)
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
    assert giver.end("verify", digest="0" * 13)[1]["phase"] == "failed"
    status, said = giver.end("commit")
    assert (status, said["phase"]) == (200, "failed")
    assert f"has digest {giver.digest}, and not 0000000000000" in said["reason"]
    assert read(client) == (live["version"], live["digest"])
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
    assert read(client) == (giver.version, giver.digest)
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


def test_a_pause_holds_every_client_until_it_is_over(client: httpx.Client) -> None:
    epoch = state(client)["epoch"] + 1
    with ThreadPoolExecutor(2) as clients:
        assert post(client, "/pause", PauseServer(epoch, lease_s=30))["paused"] is True
        asked = [clients.submit(complete, client), clients.submit(complete, client, n=2)]
        wait_for(lambda: state(client)["num_waiting"] == 3)
        assert client.get("/health").json()["status"] == "ok"
        sampled = state(client)["num_sampled"]
        assert post(client, "/pause", PauseServer(epoch, lease_s=30))["paused"] is True
        assert state(client)["num_sampled"] == sampled
        assert (
            client.post("/pause", content=msgspec.json.encode(PauseServer(epoch - 1)), headers=JSON).status_code == 409
        )
        assert post(client, "/resume", ResumeServer())["paused"] is False
        assert [len(future.result(30)["choices"]) for future in asked] == [1, 2]
        post(client, "/pause", PauseServer(epoch))
        waiting = clients.submit(complete, client)
        wait_for(lambda: state(client)["num_waiting"] == 1)
        post(client, "/pause", PauseServer(epoch, "drain"))  # what waited so far may end
        assert waiting.result(30)["choices"][0]["finish_reason"] == "length"
        post(client, "/resume", ResumeServer(epoch))


@pytest.mark.parametrize(("mode", "reason", "num_tokens"), [("abort", "abort", None), ("drain", "length", 100)])
def test_a_pause_ends_what_runs_or_lets_it_end_and_a_lost_resume_loses_nothing(
    client: httpx.Client, mode: Any, reason: str, num_tokens: int | None
) -> None:
    with ThreadPoolExecutor(2) as clients:
        running = clients.submit(complete, client, max_tokens=num_tokens or 10_000)
        wait_for(lambda: state(client)["num_running"] == 1)
        paused = post(client, "/pause", PauseServer(state(client)["epoch"], mode, lease_s=6))
        assert (paused["paused"], paused["num_running"]) == (True, 0)
        (choice,) = running.result(30)["choices"]
        assert choice["finish_reason"] == reason
        assert num_tokens in (None, len(choice["token_ids"]))
        # Nobody resumes: the lease ends.
        assert clients.submit(complete, client).result(30)["choices"][0]["finish_reason"] == "length"
    assert state(client)["paused"] is False


def test_control_routes_are_for_those_who_have_the_token(
    client: httpx.Client, token_file: Path, process: tuple[str, Any]
) -> None:
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(token_file.parent.stat().st_mode) == 0o700
    routes = ("/pause", "/resume", "/weights/prepare", "/weights/buckets/u/s/0", "/weights/abort", "/weights/lease")
    routes += ("/weights/lease/end",)
    with httpx.Client(base_url=process[0]) as stranger:
        for key in ("", "Bearer", "Bearer wrong", "Basic " + client.headers["Authorization"][7:]):
            for path in routes:
                reply = stranger.post(path, json={}, headers={"Authorization": key})
                assert reply.status_code == 401
                needs = f"its control token for this: Authorization: Bearer <token>, which is in {token_file}"
                assert needs in reply.text
        assert stranger.get("/weights/digest").status_code == 401
        assert stranger.get("/fleet/state").status_code == 200
        assert stranger.get("/weights/buckets/guessed/0").status_code == 422


def test_a_commit_whose_reply_is_lost_is_told_by_the_state_and_told_again(
    client: httpx.Client, give: Give, fault: Fault
) -> None:
    giver = give()
    giver.stage()
    fault("commit-reply", "drop")
    said = EndUpdate(giver.update.update_id, giver.epoch, giver.version, giver.digest)
    with pytest.raises(httpx.ReadTimeout):
        client.post("/weights/commit", content=msgspec.json.encode(said), headers=JSON, timeout=0.3)
    assert (state(client)["version"], state(client)["update"]["phase"]) == (giver.version, "committed")
    fault("commit-reply", "")
    assert giver.end("commit")[1]["phase"] == "committed"


def test_a_loader_that_hangs_is_seen_and_its_update_fails(client: httpx.Client, give: Give, fault: Fault) -> None:
    giver = give(settings={"bucket_timeout_s": 0.5})
    giver.prepare()
    fault("bucket-first", "hold")
    with ThreadPoolExecutor(1) as sender:
        sent = sender.submit(giver.send, 0, 0)
        assert client.get("/health").status_code == 200
        status, said = giver.end("verify")
        assert (status, said["phase"], said["num_buckets"]) == (200, "failed", 0)
        assert f"no bucket came for 0.5 s: 0 of {len(giver.offers[0].buckets)} buckets are there" in said["reason"]
        fault("bucket-first", "")
        assert sent.result(30)[0] == 409
    give().give()


def test_a_server_that_joins_gets_the_weights_of_one_that_is_there(
    client: httpx.Client, give: Give, qwen3: Family, process: tuple[str, Any]
) -> None:
    give().give()
    live = state(client)
    lease = client.post("/weights/lease", json={"bucket_bytes": 20_000}).json()
    assert (lease["version"], lease["digest"]) == (live["version"], live["digest"])
    give().give()  # the version that is on lease stays as it is
    control = ControlToken()
    app = create_app(qwen3.engine(), qwen3.tokenizer, "tiny", control=control)
    headers = {"Authorization": f"Bearer {control.text}"}
    with TestClient(app, base_url="http://127.0.0.1", headers=headers) as joiner:
        offer = msgspec.convert(lease["offer"], Offer)
        update = WeightUpdate("join", 1, lease["version"], (Receiver("joiner", "http"),))
        end = msgspec.json.encode(EndUpdate("join", 1, lease["version"], lease["digest"]))
        post(joiner, "/weights/prepare", PrepareUpdate(update, "http", (offer,)))
        said = joiner.post("/weights/verify", content=end, headers=JSON).json()
        assert (said["phase"], said["num_buckets"]) == ("verified", len(offer.buckets))
        assert len(offer.buckets) > 3
        assert joiner.post("/weights/commit", content=end, headers=JSON).json()["phase"] == "committed"
        assert joiner.get("/weights/digest").json()["digest"] == live["digest"]
        first = f"{offer.location}/0".removeprefix(process[0])
        assert client.get(first).status_code == 200
        for _ in range(2):
            post(client, "/weights/lease/end", EndVersionLease(offer.location))
        assert client.get(first).status_code == 422, "the copy is kept"
        gone = msgspec.structs.replace(offer, location=f"{offer.location}x")
        late = PrepareUpdate(WeightUpdate("late", 2, 9, (Receiver("joiner", "http"),)), "http", (gone,))
        post(joiner, "/weights/prepare", late)
        said = post(joiner, "/weights/verify", EndUpdate("late", 2, 9))
        assert said["phase"] == "failed"
        assert f"version 9 did not come: {offer.sender} gave no bucket 0: HTTP 422" in said["reason"]


def test_weights_that_are_loaded_in_place_keep_everybody_out_until_the_commit(
    qwen3: Family, weights: dict[str, Tensor]
) -> None:
    control = ControlToken()
    config = ServerConfig(stage_weights=False)
    app = create_app(qwen3.engine(), qwen3.tokenizer, "tiny", config, control=control)
    headers = {"Authorization": f"Bearer {control.text}"}
    with TestClient(app, base_url="http://127.0.0.1", headers=headers) as local, ThreadPoolExecutor(1) as asking:
        broken = Giver(local, perturbed(weights, 1), 1)
        broken.prepare()
        broken.send(0, 0)
        assert state(local)["serving"] is False
        waiting = asking.submit(complete, local)
        wait_for(lambda: state(local)["num_waiting"] == 1)
        broken.end("abort")
        assert waiting.result(30)["choices"][0]["finish_reason"] == "abort"
        assert "has the weights of no version" in complete(local)["error"]["message"]
        whole = Giver(local, perturbed(weights, 2), 2, epoch=2)
        whole.give()
        assert state(local)["serving"] is True
        assert complete(local)["choices"][0]["weight_versions"] == [[2, whole.digest, 12]]


def test_a_commit_that_fails_half_way_ends_the_server(
    qwen3: Family, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(engine: Engine, tensors: Any, version: int) -> None:
        swap(engine, dict(list(tensors.items())[:3]), version)

    swap = Engine.swap_weights
    monkeypatch.setattr(Engine, "swap_weights", half)
    control, failures = ControlToken(), list[EngineFailed]()
    app = create_app(qwen3.engine(), qwen3.tokenizer, "tiny", None, failures.append, control=control)
    headers = {"Authorization": f"Bearer {control.text}"}
    with TestClient(app, base_url="http://127.0.0.1", headers=headers) as local:
        giver = Giver(local, perturbed(weights, 1), 1)
        giver.stage()
        status, said = giver.end("commit")
        assert status == 503
        assert "the engine failed: KeyError" in said["error"]["message"]
        assert len(failures) == 1


@pytest.mark.parametrize("carrier", ["shared_memory", "point_to_point", "disk"])
def test_a_thread_of_the_server_fetches_what_a_sender_has(
    client: httpx.Client, give: Give, carrier: WeightCarrier, tmp_path: Path
) -> None:
    giver = give()
    update = msgspec.structs.replace(giver.update, receivers=(Receiver("it", carrier),), folder=str(tmp_path))
    reports: list[SendReport] = []

    def fill(bucket: Bucket, buffer: Tensor) -> int:
        buffer[: bucket.num_bytes] = content_of(giver.held, bucket)
        return sum(
            box_digest(box.name, giver.tensors[box.name][tuple(map(slice, box.start, box.stop))], box.start)
            for box in bucket.boxes
        )

    memory = RingMemory()
    sender = WeightSender(update, giver.offers[0], fill, reports.append, memory)
    said = post(client, "/weights/prepare", PrepareUpdate(update, carrier, (sender.start(),), "it"))
    assert said["phase"] in ("prepared", "receiving", "staged"), "the thread is at work before the reply is there"
    assert giver.end("verify")[1]["phase"] == "verified"
    sender.finish(10)
    memory.close()
    assert [(report.failed, report.digest) for report in reports] == [({}, giver.digest)]
    assert giver.end("commit")[1]["phase"] == "committed"
    assert client.get("/weights/digest").json()["digest"] == giver.digest


def test_one_that_is_told_to_end_is_heard_to_leave_by_its_fleet_before_its_port_is_closed(
    qwen3: Family, tmp_path: Path
) -> None:
    with server(qwen3.folder, tmp_path) as (url, process):
        (file,) = (tmp_path / "ductile" / "servers").iterdir()
        token = json.loads(file.read_text())["token"]
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
            post(client, "/pause", PauseServer(1, lease_s=60))
            assert not state(client)["leaving"]
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(complete, client)  # it holds the server, until it is resumed
                wait_for(lambda: state(client)["num_waiting"] > 0 or state(client)["num_running"] > 0)
                process.terminate()
                wait_for(lambda: state(client)["leaving"])
                refused = client.post("/v1/completions", json={"prompt": "hello"})
                assert refused.status_code == 503
                assert "this server is leaving" in refused.text
                post(client, "/resume", ResumeServer())
                assert waiting.result(30)["choices"][0]["finish_reason"] == "length"
        assert process.wait(60) == 0


ADAPTERS: dict[str, Any] = {"rank": 2, "alpha": 4.0, "target_modules": ["q_proj", "k_proj"]}


@pytest.mark.parametrize(
    ("adapters", "is_the_runs"),
    [
        (ADAPTERS, True),
        (ADAPTERS | {"alpha": 8.0}, False),
        (ADAPTERS | {"target_modules": ["q_proj", "v_proj"]}, False),
        (ADAPTERS | {"rank": 4, "alpha": 8.0}, False),
        (None, False),
    ],
    ids=["the_same", "alpha", "targets_of_equal_shapes", "rank", "none"],
)
def test_a_server_with_other_adapters_is_another_model(
    qwen3: Family, adapters: dict[str, Any] | None, is_the_runs: bool
) -> None:
    """Also where all of their tensors have the same names and shapes, so that it would take the run's weights."""
    run = RLConfig.model_validate({"trainer": {"model": {"name": str(qwen3.folder), "lora": ADAPTERS}}})
    config = InferenceConfig(model=InferenceModelConfig.model_validate({"max_model_len": 256, "lora": adapters}))
    model = load_model(qwen3.folder, lora=config.model.adapters)
    engine = Engine(model, config, qwen3.tokenizer.eos_token_ids, qwen3.tokenizer.decode)
    with TestClient(create_app(engine, qwen3.tokenizer, "tiny"), base_url="http://127.0.0.1") as local:
        assert (state(local)["model"] in models_of(run)) == is_the_runs
