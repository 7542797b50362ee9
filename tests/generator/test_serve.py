"""A server process as `ductile inference` starts it, and the official client."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ductile.config.schema.run import InferenceRunConfig
from ductile.generator.server.serve import serve
from tests.generator.conftest import Family, request, run
from tests.nightly import mostly_nightly


@contextmanager
def server(
    folder: Path,
    tmp_path: Path,
    *,
    fault: str = "",
    token_folder: Path | None = None,
    scheme: str = "http",
    **settings: Any,
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process and its URL. It is killed at the end, if it still runs. Its control token is in a file below
    tmp_path, or token_folder.
    fault: `tests.generator.faulty_server`'s."""
    model = {"name": str(folder), "max_model_len": 20_000}
    config = {"model": model, "server": {"port": 0, **settings.pop("server", {})}, "block_size": 64} | settings
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    module = "tests.generator.faulty_server" if fault else "ductile.generator.server.serve"
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(path), *filter(None, [fault])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(token_folder or tmp_path)},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"serving {folder} on {scheme}://127.0.0.1:"), line + process.stdout.read()
        yield line.split()[-1], process
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def complaints(log: str) -> list[str]:
    """Return the lines of a log but those that tell what the server does."""
    return [line for line in log.splitlines() if " INFO " not in line]


def wait_for(happened: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", verify=False).text.splitlines()
    return float(next((line.split()[-1] for line in lines if line.startswith(f"ductile_{name} ")), 0))


@pytest.fixture(scope="module")
def url(qwen3: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with server(qwen3.folder, folder) as (url, process):
        yield url
        # Everything the tests did ends in an orderly way, here at the notice of a batch system.
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert not complaints(process.stdout.read())
        assert not any((folder / "ductile" / "servers").iterdir())


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="not needed", max_retries=0, timeout=60) as client:
        yield client


def test_the_client_lists_the_model(client: openai.OpenAI, qwen3: Family) -> None:
    (model,) = client.models.list().data
    assert model.id == str(qwen3.folder)


def test_the_client_completes(client: openai.OpenAI, qwen3: Family) -> None:
    expected = run(qwen3.engine(), [request("r", "hello", 12)])["r"]
    response = client.completions.create(
        model=str(qwen3.folder),
        prompt="hello",
        temperature=0,
        max_tokens=12,
        logprobs=1,
        extra_body={"ignore_eos": True, "top_k": -1, "min_p": 0, "return_token_ids": True},
    )
    (choice,) = response.choices
    assert choice.text == qwen3.tokenizer.decode(list(expected.token_ids))
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert choice.model_extra is not None
    assert tuple(choice.model_extra["token_ids"]) == expected.token_ids
    assert response.usage is not None
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (5, 12)


def test_the_client_chats(client: openai.OpenAI, qwen3: Family) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    prompt = qwen3.tokenizer.apply_chat_template(messages)
    expected = run(qwen3.engine(), [request("r", prompt, 10, temperature=0.9, seed=4)])["r"]
    response = client.chat.completions.create(
        model=str(qwen3.folder),
        messages=messages,
        temperature=0.9,
        seed=4,
        max_completion_tokens=10,
        logprobs=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (choice,) = response.choices
    assert response.model_extra is not None
    assert response.model_extra["prompt_token_ids"] == prompt
    assert choice.model_extra is not None
    assert tuple(choice.model_extra["token_ids"]) == expected.token_ids
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(expected.logprobs, abs=1e-5)
    assert choice.message.content == qwen3.tokenizer.decode(list(expected.token_ids))


def test_the_client_sees_likely_tokens_and_echoes(client: openai.OpenAI, qwen3: Family) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    fixed: Any = {"model": str(qwen3.folder), "temperature": 0}
    chat = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, max_tokens=2, **fixed)
    assert chat.choices[0].logprobs is not None
    for entry in chat.choices[0].logprobs.content or []:
        assert len(entry.top_logprobs) == 2
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
    (echo,) = client.completions.create(prompt="hello", echo=True, logprobs=3, max_tokens=0, **fixed).choices
    assert echo.logprobs is not None
    assert (echo.text, echo.logprobs.tokens, echo.finish_reason) == ("hello", list("hello"), "length")


def test_the_client_streams(client: openai.OpenAI, qwen3: Family) -> None:
    expected = run(qwen3.engine(), [request("r", "hello", 12)])["r"]
    fixed: Any = {"model": str(qwen3.folder), "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    text = qwen3.tokenizer.decode(list(expected.token_ids))
    chunks = list(client.completions.create(prompt="hello", stream=True, **fixed))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert len(chunks) > 1
    messages: Any = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(messages=messages, **fixed)
    pieces = list(client.chat.completions.create(messages=messages, stream=True, **fixed))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == "length"


def test_the_client_sees_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"temperature is -1\.0; it must be 0 or at least 1e-05"):
        client.completions.create(model="", prompt="x", temperature=-1, extra_body={"model": None})
    with pytest.raises(openai.NotFoundError, match='the model "other" is not served here'):
        client.completions.create(model="other", prompt="x")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_sequences(url: str, stream: bool) -> None:
    body = {"prompt": "hello", "max_tokens": 19_000, "ignore_eos": True, "stream": stream, "n": 2}
    with httpx.Client() as leaving:
        if stream:
            with leaving.stream("POST", f"{url}/v1/completions", json=body) as response:
                lines = response.iter_lines()  # to drop them is to hang up
                next(lines)
                assert metric(url, "sequences_running") == 2
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(f"{url}/v1/completions", json=body, timeout=0.5)
    wait_for(lambda: metric(url, "sequences_running") == 0 and metric(url, "sequences_waiting") == 0)
    assert metric(url, "cache_used") == 0


def test_responses_under_way_are_finished_before_the_server_goes(qwen3: Family, tmp_path: Path) -> None:
    with server(qwen3.folder, tmp_path) as (url, process):
        body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) == 300
        assert process.wait(60) == 0


def test_a_server_whose_engine_is_dead_ends(qwen3: Family, tmp_path: Path) -> None:
    with server(qwen3.folder, tmp_path, fault="device_lost") as (url, process):
        body = {"prompt": "hello", "max_tokens": 19_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as under_way:
            lines = under_way.iter_lines()
            next(lines)
            last = httpx.post(f"{url}/v1/completions", json={"prompt": [7, 7, 7]}, timeout=60)
            rest = [line for line in lines if line]
        assert last.status_code == 503
        assert last.json()["error"]["message"] == "the engine failed: RuntimeError: device lost"
        assert "the engine failed: RuntimeError: device lost" in rest[-2]
        assert process.wait(60) == 1
        assert process.stdout is not None
        assert complaints(process.stdout.read()) == ["ductile inference: the engine failed: RuntimeError: device lost"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "model.name is not set; it must be a Hugging Face model folder"),
        ({"model": {"name": "/nowhere"}}, "/nowhere"),
        (
            {"server": {"host": "0.0.0.0"}},
            'server.host = "0.0.0.0" can be reached from other machines, so server.api_key_var must be set',
        ),
        ({"server": {"host": "example.invalid", "api_key": "x" * 8}}, "cannot listen on example.invalid:8000"),
        ({"server": {"api_key": "1234567", "port": 0}}, "server.api_key = *** must be a key of at least 8 characters"),
        ({"server": {"api_key": "", "port": 0}}, "server.api_key = *** must be a key of at least 8 characters"),
        ({"parallel": {"dp": 2}}, "parallel.dp is 2; a server holds one copy of the model"),
        ({"cache_memory_gib": 1e-6}, "cache_memory_gib 1e-06 gives the KV cache room for 0 tokens"),
        ({"model": {"chat_template": "/nowhere.jinja"}}, "/nowhere.jinja"),
    ],
)
def test_what_cannot_be_served_is_refused(
    qwen3: Family, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], message: str
) -> None:
    model = {"name": str(qwen3.folder)} | settings.pop("model", {}) if settings else {}
    port = settings.get("server", {"port": 0})
    assert serve(InferenceRunConfig.model_validate({"model": model, "server": port} | settings)) == 1
    error = capsys.readouterr().err
    assert error.startswith("ductile inference: ")
    assert message in error


def test_a_port_that_is_taken(qwen3: Family, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = {"model": {"name": str(qwen3.folder)}, "server": {"port": port}}
        assert serve(InferenceRunConfig.model_validate(config)) == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("signum", mostly_nightly([signal.SIGINT, signal.SIGTERM], signal.SIGINT))
def test_a_signal_between_the_first_line_and_uvicorn_s_own_handlers_ends_it(
    qwen3: Family, tmp_path: Path, signum: signal.Signals
) -> None:
    with server(qwen3.folder, tmp_path, fault=signum.name) as (_, process):
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert not complaints(process.stdout.read())
