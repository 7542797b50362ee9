"""The server inside this process: what it serves, refuses and says of itself."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from ductile.config.schema.inference import ServerConfig
from ductile.generator.engine.engine import Engine
from ductile.generator.engine.kv_transfer import RequestKV
from ductile.generator.engine.logprob_report import LogprobReport
from ductile.generator.server import service
from ductile.generator.server.responses import TextCompletion
from ductile.generator.server.runner import EngineFailed
from ductile.generator.server.server import create_app
from ductile.records import GenerateRequest, Generation
from tests.generator.conftest import Family, request, run

Client = TestClient


def local(app: FastAPI) -> Client:
    return TestClient(app, base_url="http://127.0.0.1:8000")


@pytest.fixture(scope="module")
def client(qwen3: Family) -> Iterator[Client]:
    engine = qwen3.engine(num_blocks=8)
    with local(create_app(engine, qwen3.tokenizer, "tiny")) as client:
        yield client


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"prompt": "x", "temperature": -1}, "temperature is -1.0; it must be 0 or at least 1e-05"),
    ("completions", {"prompt": "x", "temperature": "hot"}, 'temperature is "hot"; it must be a number'),
    ("completions", {"prompt": "x", "top_p": 0}, "top_p is 0.0; it must be above 0 and at most 1"),
    ("completions", {"prompt": "x", "top_k": -2}, "top_k is -2; it must be -1 (all) or 1 or more"),
    ("completions", {"prompt": "x", "min_p": 2}, "min_p is 2.0; it must be from 0 to 1"),
    ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
    ("completions", {"prompt": "x", "max_tokens": 1.5}, "max_tokens is 1.5; it must be a whole number"),
    ("completions", {"prompt": "x", "n": 0}, "n is 0; it must be 1 or more"),
    ("completions", {"prompt": "x", "stop": ""}, 'stop is ""; each of its texts must have at least one character'),
    ("completions", {"prompt": "x", "stop": ["a", ""]}, 'stop is ["a", ""]; each of its texts must have'),
    ("completions", {"prompt": "x", "logprobs": 21}, "logprobs is 21; it must be 20 or less"),
    (
        "completions",
        {"prompt": ["x"] * 4, "n": 1000, "max_tokens": 100, "logprobs": 20},
        "4000 sequences have up to 400000 tokens, and 20 likely ones each are more than 2097152; lower max_tokens, n,",
    ),
    ("completions", {"prompt": "x", "logprobs": -1}, "logprobs is -1; it must be 0 or more"),
    ("completions", {"prompt": "x", "echo": "yes"}, 'echo is "yes"; it must be true or false'),
    ("completions", {"prompt": "x", "suffix": "end"}, 'suffix = "end" is not offered by this server; leave it out'),
    ("completions", {"prompt": "x", "best_of": 3}, "best_of = 3 is not offered"),
    (
        "completions",
        {"prompt": "x", "temprature": 1},
        "temprature is not a field of this request. Did you mean temperature?",
    ),
    ("completions", {}, "prompt is missing"),
    ("completions", {"prompt": ""}, "the prompt has no tokens; it needs at least one"),
    ("completions", {"prompt": []}, "the prompt has no tokens"),
    ("completions", {"prompt": ["x", []]}, "the prompt has no tokens"),
    ("completions", {"prompt": 7}, "prompt is 7; it must be a text, a list of token ids, or a list of these"),
    ("completions", {"prompt": [5, "x"]}, 'prompt is [5, "x"]; it must be a text'),
    ("completions", {"prompt": [[5], [True]]}, "prompt is [[5], [true]]; it must be a text"),
    ("completions", {"prompt": [5, 9999]}, "token id 9999 is not in the vocabulary; ids go from 0 to 101"),
    ("completions", {"prompt": [5, 2**40]}, "token id 1099511627776 is not in the vocabulary; ids go from 0 to 101"),
    ("completions", {"prompt": [5, -(2**40)]}, "token id -1099511627776 is not in the vocabulary"),
    ("completions", {"prompt": "x", "seed": 10**4299}, "seed is 1000000000"),
    ("completions", {"prompt": "x", "seed": 2**63 - 1}, "it must be less than 9223372036854774784"),
    ("completions", {"prompt": "x", "n": 2000}, "n is 2000; it must be 1024 or less"),
    ("completions", {"prompt": ["x"] * 5, "n": 1000}, "5 prompts and n = 1000 make 5000 sequences"),
    ("completions", {"prompt": "x", "stop": ["a"] * 65}, "stop may hold at most 64 texts of at most 256 characters"),
    ("completions", {"prompt": "x", "stop": "a" * 257}, "stop may hold at most 64 texts of at most 256 characters"),
    ("completions", {"prompt": "x", "stop": [7]}, "stop is [7]; it must be a text or a list of texts"),
    ("completions", {"prompt": "x", "stop_token_ids": [1] * 129}, "it must be a list of at most 128"),
    ("completions", {"prompt": "x", "max_tokens": 256}, "max_tokens is 256, and the prompt has 1 tokens;"),
    ("completions", {"prompt": "x" * 4000}, "the prompt has 4000 characters; model.max_model_len 256 leaves room for"),
    ("completions", {"prompt": "x", "tools": ["t" * 100_000]}, 'tools = ["tttttttttttttt'),
    ("completions", {"prompt": "x" * 256}, "the prompt has 256 tokens; model.max_model_len 256 leaves room for 255"),
    ("completions", {"prompt": "x", "max_tokens": 200}, "may reach 201 tokens and the whole cache holds 128"),
    ("completions", {"prompt": "x", "stream": True, "max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
    ("chat/completions", {"messages": []}, "messages is []; it must be a list of at least 1"),
    ("chat/completions", {"messages": [{"content": "x"}]}, "messages.0.role is missing"),
    ("chat/completions", {"messages": [{"role": "bot", "content": "x"}]}, 'messages.0.role is "bot"; it must be'),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs may not hold messages, which the request gives by itself",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0 has a part 1 of type 'image_url'; parts are {",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3},
        "top_logprobs is 3, which goes with logprobs = true",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "tools": [{}]},
        "tools.0.type is missing",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
        'response_format = {"type": "json_object"} is not offered',
    ),
    (
        "completions",
        {"prompt": "hello", "num_generated": 2},
        "num_generated is 2, which goes with one prompt of token ids",
    ),
    (
        "completions",
        {"prompt": [5, 6], "num_generated": 2},
        "num_generated is 2, and the prompt has 2 tokens; it must be fewer",
    ),
]


@pytest.mark.parametrize(("route", "body", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests(client: Client, route: str, body: dict[str, Any], message: str) -> None:
    response = client.post(f"/v1/{route}", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert len(error["message"]) < 300
    assert error["type"] == "invalid_request_error"


def test_bad_token_request(client: Client) -> None:
    response = client.post("/inference/v1/generate", json={"token_ids": [], "sampling_params": {}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "token_ids")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt":', "the body is not JSON: EOF while parsing a value at line 1 column 10"),
        (b"", "the body is not JSON: EOF"),
        (b'{"prompt": "\\ud800"}', "the body is not JSON: unexpected end of hex escape"),
        (b'{"prompt": "\xed\xa0\x80"}', "the body is not JSON: invalid unicode code point"),
        (b'{"prompt": "\xff"}', "the body is not JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "the body is not JSON"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature is inf; it must be a finite number"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "the body is not JSON: number out of range"),
        (b'{"prompt": ' + b"[" * 50_000, "the body is not JSON: recursion limit exceeded"),
        (b'{"prompt": [' + b"[]," * 100_000 + b"[]]}", "the body has more than 65536 lists and objects"),
        (b"[1, 2]", "the body is [1, 2]; it must be a JSON object with the request's fields"),
        (b'{"best_off": 3}', "best_off is not a field of this request. Did you mean best_of?"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bodies_that_are_no_request(client: Client, body: bytes, message: str) -> None:
    response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_brackets_in_a_text_are_no_lists(client: Client) -> None:
    response = client.post("/v1/completions", json={"prompt": '[\\"{' * 30_000})
    assert "the prompt has 120000 characters" in response.json()["error"]["message"]


def test_unknown_model_and_route(client: Client) -> None:
    response = client.post("/v1/completions", json={"model": "gpt-9", "prompt": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert 'the model "gpt-9" is not served here; this is "tiny"' in response.json()["error"]["message"]
    response = client.get("/v1/nothing")
    assert (response.status_code, response.json()["error"]["message"]) == (404, "GET /v1/nothing: Not Found")


def test_models(client: Client) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["weight_version"]) == ("tiny", 256, 0)


def test_the_model_has_the_name_that_it_is_given(qwen3: Family) -> None:
    config = ServerConfig(served_model_name="org/letters")
    with local(create_app(qwen3.engine(), qwen3.tokenizer, "/home/me/secret/model", config)) as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert model["id"] == "org/letters"
        assert client.get("/v1/models/org/letters").json() == model
        responses = [client.get("/v1/models/other"), client.post("/v1/completions", json={"model": "x", "prompt": "x"})]
        for response in responses:
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
            assert "secret" not in response.text
        body = {"model": "org/letters", "prompt": "x", "max_tokens": 1}
        assert client.post("/v1/completions", json=body).json()["model"] == "org/letters"


def test_tokens_in_tokens_out(client: Client, qwen3: Family) -> None:
    expected = run(qwen3.engine(), [request("r", [9, 8, 7], 6)])["r"]
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 1, "skip_special_tokens": False}
    body = {"model": "tiny", "token_ids": [9, 8, 7], "sampling_params": params}
    response = client.post("/inference/v1/generate", json=body).json()
    (choice,) = response["choices"]
    assert response["request_id"]
    assert tuple(choice["token_ids"]) == expected.token_ids
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(expected.logprobs, abs=1e-5)
    assert choice["finish_reason"] == "length"


def test_completions_take_several_prompts_in_tokens_or_text(client: Client, qwen3: Family) -> None:
    texts = ["one", "two"]
    fixed = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "n": 2, "return_token_ids": True}
    by_text = client.post("/v1/completions", json={"prompt": texts, **fixed}).json()
    by_token = client.post(
        "/v1/completions", json={"prompt": [qwen3.tokenizer.encode(t) for t in texts], **fixed}
    ).json()
    assert by_text["choices"] == by_token["choices"]
    assert [choice["index"] for choice in by_text["choices"]] == [0, 1, 2, 3]
    prompts = [choice["prompt_token_ids"] for choice in by_text["choices"]]
    assert prompts == [qwen3.tokenizer.encode(text) for text in ("one", "one", "two", "two")]
    assert by_text["usage"] == {"prompt_tokens": 6, "completion_tokens": 16, "total_tokens": 22}


def test_choices_of_one_seed_differ_and_come_again(client: Client) -> None:
    body = {"prompt": "hello", "n": 3, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    first, second = (client.post("/v1/completions", json=body).json()["choices"] for _ in range(2))
    assert [choice["text"] for choice in first] == [choice["text"] for choice in second]
    assert len({choice["text"] for choice in first}) == 3


def test_a_completion_that_another_server_has_begun_goes_on_as_if_it_were_one(client: Client) -> None:
    """With the random numbers that it would have got, and through a stop string that has begun."""
    prompt = [5, 6, 7]
    body = {"prompt": prompt, "seed": 5, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}

    def completed(**changed: Any) -> Any:
        response = client.post("/v1/completions", json=body | changed)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    whole = completed()
    for known in (1, 5, 11):
        begun = whole["token_ids"][:known]
        rest = completed(prompt=[*prompt, *begun], num_generated=known, max_tokens=12 - known)
        assert [*begun, *rest["token_ids"]] == whole["token_ids"]
        assert rest["logprobs"]["token_logprobs"] == pytest.approx(
            whole["logprobs"]["token_logprobs"][known:], abs=1e-4
        )
        assert rest["finish_reason"] == "length"
    stopped = completed(stop=[whole["text"][3:6]])
    known = next(n for n in range(1, 12) if len(completed(max_tokens=n)["text"]) >= 4)
    begun = whole["token_ids"][:known]
    rest = completed(prompt=[*prompt, *begun], num_generated=known, max_tokens=12 - known, stop=[whole["text"][3:6]])
    assert [*begun, *rest["token_ids"]] == stopped["token_ids"]
    assert rest["finish_reason"] == "stop"


def test_stop_strings_are_not_shown(client: Client) -> None:
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    for stream in (False, True):
        response = client.post("/v1/completions", json=body | {"stop": [text[4:6]], "stream": stream})
        choices = [event["choices"][0] for event in events(response.text)] if stream else response.json()["choices"]
        assert "".join(choice["text"] for choice in choices) == text[: text.index(text[4:6])]
        assert choices[-1]["finish_reason"] == "stop"


def test_a_streamed_response_says_the_same_as_a_whole_one(client: Client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    body = {"messages": messages, "n": 2, "seed": 1, "max_completion_tokens": 8, "ignore_eos": True}
    body |= {"logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
    whole = client.post("/v1/chat/completions", json=body).json()
    streamed = events(
        client.post(
            "/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
        ).text
    )
    assert streamed[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert streamed[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [c for event in streamed for c in event["choices"] if c["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
        assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
        contents = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert [entry["token"] for entry in contents] == [f"token_id:{token}" for token in choice["token_ids"]]
        expected = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert [entry["logprob"] for entry in contents] == pytest.approx(expected, abs=1e-5)
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_health_runs_a_step(client: Client) -> None:
    def generated() -> float:
        lines = client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("ductile_generated_tokens_total")).split()[1])

    before = generated()
    assert client.get("/health").json()["status"] == "ok"
    assert generated() == before + 1


def test_metrics_count(client: Client) -> None:
    client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3, "ignore_eos": True})
    text = client.get("/metrics").text
    for name in (
        "sequences_running 0.0",
        "cache_used 0.0",
        "weight_version 0.0",
        'requests_finished_total{reason="length"}',
    ):
        assert f"ductile_{name}" in text
    (peak,) = (line.split()[1] for line in text.splitlines() if line.startswith("ductile_peak_memory_bytes "))
    assert float(peak) > 1e7


class Stuck(Engine):
    """An engine that does not come back from a step until it is told to."""

    release = threading.Event()

    def step(self) -> list[Generation]:
        self.release.wait(60)
        return super().step()


class Broken(Engine):
    def step(self) -> list[Generation]:
        raise RuntimeError("out of memory")


def over(kind: type[Engine], family: Family) -> Engine:
    sound = family.engine()
    return kind(sound.model, sound.config, family.tokenizer.eos_token_ids, family.tokenizer.decode)


def test_health_says_when_the_engine_is_stuck(qwen3: Family) -> None:
    with local(create_app(over(Stuck, qwen3), qwen3.tokenizer, "tiny", health_deadline_s=0.2)) as client:
        response = client.get("/health")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the engine did not finish a step within 0.2 s"
        assert client.get("/liveness").status_code == 200
        Stuck.release.set()


def test_a_failed_engine_tells_everybody(qwen3: Family) -> None:
    failures: list[EngineFailed] = []
    with local(create_app(over(Broken, qwen3), qwen3.tokenizer, "tiny", on_failure=failures.append)) as client:
        for response in (
            client.post("/v1/completions", json={"prompt": "x"}),
            client.post("/v1/completions", json={"prompt": "x", "stream": True}),
            client.get("/health"),
            client.get("/liveness"),
        ):
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "the engine failed: RuntimeError: out of memory"
        assert [str(failure) for failure in failures] == ["the engine failed: RuntimeError: out of memory"]


class Picky(Engine):
    """An engine that fails at a request of three tokens: when it comes, or when it is on its way."""

    when = "add"

    def add(
        self, request: GenerateRequest, cache: RequestKV | None = None, report: LogprobReport | None = None
    ) -> None:
        if self.when == "add" and len(request.prompt) == 3:
            raise OverflowError("three")
        super().add(request, cache, report)

    def step(self) -> list[Generation]:
        done = super().step()
        for id, sequence in list(self._live.items()):
            if self.when == "step" and len(sequence.request.prompt) == 3:
                self._end(sequence, "abort")
                self.failed[id] = OverflowError("three")
        return done


@pytest.mark.parametrize("when", ["add", "step"])
def test_a_request_that_fails_ends_alone(qwen3: Family, when: str) -> None:
    engine = over(Picky, qwen3)
    engine.when = when  # pyright: ignore[reportAttributeAccessIssue]
    with local(create_app(engine, qwen3.tokenizer, "tiny")) as client:
        body = {"prompt": [[5, 6], [5, 6, 7]], "max_tokens": 200, "ignore_eos": True}
        response = client.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        assert response.json()["error"]["message"] == "this request failed: OverflowError: three"
        good = client.post("/v1/completions", json=body | {"prompt": [5, 6]}).json()
        assert good["usage"]["completion_tokens"] == 200
        assert client.get("/health").status_code == 200
        assert "ductile_sequences_running 0.0" in client.get("/metrics").text  # the other choice was aborted


def test_a_stream_that_cannot_be_written_ends_with_an_error(qwen3: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    def piece(*_: object) -> None:
        raise TypeError("no JSON")

    with local(create_app(qwen3.engine(), qwen3.tokenizer, "tiny")) as client:
        with monkeypatch.context() as patch:
            patch.setattr(TextCompletion, "piece", piece)
            told = events(client.post("/v1/completions", json={"prompt": "x", "stream": True}).text)
        assert told[-1]["error"]["message"] == "the response cannot be written: TypeError: no JSON"
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        assert "ductile_sequences_running 0.0" in client.get("/metrics").text


def test_a_length_that_nobody_asked_for_is_one_that_log_probs_may_have(
    qwen3: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_REPORTED", 200)
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    with local(create_app(qwen3.engine(), qwen3.tokenizer, "tiny")) as client:
        for n, length in ((1, 10), (2, 5)):
            choices = client.post("/v1/chat/completions", json=body | {"n": n}).json()["choices"]
            assert [len(each["logprobs"]["content"]) for each in choices] == [length] * n
            assert {each["finish_reason"] for each in choices} == {"length"}
        for asked in ({"max_tokens": 11}, {"n": 11}):
            assert client.post("/v1/chat/completions", json=body | asked).status_code == 400


def test_a_full_server_says_so(qwen3: Family) -> None:
    config = ServerConfig(max_sequences=3)
    with local(create_app(over(Stuck, qwen3), qwen3.tokenizer, "tiny", config)) as client:
        Stuck.release.clear()
        body = {"prompt": "x", "n": 2, "max_tokens": 2}
        with ThreadPoolExecutor() as pool:
            first, second = (pool.submit(client.post, "/v1/completions", json=body) for _ in range(2))
            done, _ = wait((first, second), return_when=FIRST_COMPLETED)
            (full,) = done
            Stuck.release.set()
        assert full.result().status_code == 503
        assert full.result().headers["retry-after"] == "1"
        assert "server.max_sequences is 3: there is no room for 2 more now" in full.result().json()["error"]["message"]
        assert {first.result().status_code, second.result().status_code} == {200, 503}
        assert client.post("/v1/completions", json=body).status_code == 200


def test_a_stop_string_of_special_tokens_ends_generation_where_it_ends_the_text(qwen3: Family) -> None:
    with local(create_app(qwen3.engine(), qwen3.tokenizer, "tiny")) as client:
        fixed = {"prompt": "hello", "max_tokens": 200, "temperature": 50, "seed": 3, "ignore_eos": True}
        fixed |= {"skip_special_tokens": False, "return_token_ids": True}
        (plain,) = client.post("/v1/completions", json=fixed).json()["choices"]
        at = plain["text"].index("<|im_start|>")
        stop = plain["text"][at : at + len("<|im_start|>") + 1]
        for stream in (False, True):
            response = client.post("/v1/completions", json=fixed | {"stop": stop, "stream": stream})
            parts = [event["choices"][0] for event in events(response.text)] if stream else response.json()["choices"]
            assert "".join(part["text"] for part in parts) == plain["text"][:at]
            assert parts[-1]["finish_reason"] == "stop"
            said = [token for part in parts for token in part["token_ids"]]
            assert qwen3.tokenizer.decode(said, skip_special_tokens=False) == plain["text"][: at + len(stop)]


def test_a_response_that_ends_with_the_end_token_does_not_show_it(qwen3: Family) -> None:
    plain = run(qwen3.engine(), [request("r", "hello", 8)])["r"].token_ids
    engine = Engine(qwen3.engine().model, qwen3.engine().config, (plain[3],), qwen3.tokenizer.decode)
    with local(create_app(engine, qwen3.tokenizer, "tiny")) as client:
        body = {
            "prompt": "hello",
            "temperature": 0,
            "max_tokens": 8,
            "stop_token_ids": [plain[3]],
            "return_token_ids": True,
        }
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    end = plain.index(plain[3])
    assert tuple(choice["token_ids"]) == plain[: end + 1]
    assert choice["text"] == qwen3.tokenizer.decode(list(plain[:end]))
    assert choice["finish_reason"] == "stop"


def test_requests_that_say_nothing_are_sampled_by_the_models_own_defaults(qwen3: Family) -> None:
    said = {"prompt": "hello", "return_token_ids": True, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
    defaults = {"temperature": 0.0, "max_new_tokens": 7}
    with local(create_app(qwen3.engine(), qwen3.tokenizer, "tiny", defaults=defaults)) as client:

        def drawn(**more: object) -> set[tuple[int, ...]]:
            answers = [client.post("/v1/completions", json=said | more).json() for _ in range(3)]
            return {tuple(answer["choices"][0]["token_ids"]) for answer in answers}

        assert drawn() == drawn(temperature=0)
        assert len(drawn(temperature=1)) == 3
        lengths = [
            client.post("/v1/chat/completions", json=chat | more).json()["usage"]["completion_tokens"]
            for more in ({}, {"max_tokens": 9})
        ]
    assert lengths == [7, 9]
