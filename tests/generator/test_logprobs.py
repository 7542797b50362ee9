"""Log-probs that a client asks for: the likeliest tokens, a prompt's, and each one's bytes, against a forward pass."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from ductile.generator.engine.logprob_report import LogprobReport
from ductile.generator.server.server import create_app
from ductile.tasks.tokenizer import Tokenizer
from tests.generator.conftest import Family, request, run
from tests.generator.test_server import events, local
from tests.tasks.test_token_bytes import byte_level, metaspace
from tests.tiny import SPECIALS, make_hf_model

PROMPT = [9, 8, 7, 30, 12, 9, 8, 7, 30, 12, 55, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69]


@pytest.fixture(scope="module")
def client(qwen3: Family) -> Iterator[TestClient]:
    with local(create_app(qwen3.engine(block_size=4), qwen3.tokenizer, "tiny")) as client:
        yield client


def all_logprobs(tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[T, V]: what transformers says of the token behind each."""
    with torch.no_grad():
        return (make_hf_model("qwen3")(torch.tensor([tokens])).logits[0] / temperature).log_softmax(-1)


def complete(client: TestClient, **body: Any) -> Any:
    response = client.post("/v1/completions", json={"temperature": 0, "ignore_eos": True} | body)
    assert response.status_code == 200, response.text
    return response.json()


def test_an_echo_has_the_prompt_s_log_probs(client: TestClient, qwen3: Family) -> None:
    expected = all_logprobs(PROMPT)
    chosen = [expected[at, token].item() for at, token in enumerate(PROMPT[1:])]
    for _ in range(2):  # the second time its blocks are in the cache
        for max_tokens in (0, 1):  # as lm-eval asks, newer and older
            body = {"prompt": [PROMPT, PROMPT[:5]], "echo": True, "logprobs": 1, "max_tokens": max_tokens, "seed": 1234}
            response = complete(client, **body)
            assert response["usage"]["completion_tokens"] == 2 * max_tokens
            for choice, prompt in zip(response["choices"], (PROMPT, PROMPT[:5]), strict=True):
                logprobs = choice["logprobs"]
                assert len(logprobs["tokens"]) == len(prompt) + max_tokens
                first, *others = logprobs["token_logprobs"]
                assert first is logprobs["top_logprobs"][0] is None
                assert others[: len(prompt) - 1] == pytest.approx(chosen[: len(prompt) - 1], abs=1e-4)
                for at, top in enumerate(logprobs["top_logprobs"][1 : len(prompt)]):
                    assert max(top.values()) == pytest.approx(expected[at].max().item(), abs=1e-4)
                    assert top[logprobs["tokens"][at + 1]] == others[at]
                assert "".join(logprobs["tokens"]) == choice["text"]
                assert choice["finish_reason"] == "length"


def test_an_echo_is_the_same_for_a_text_and_for_its_tokens_and_streamed(client: TestClient, qwen3: Family) -> None:
    prompt = "one <|im_start|>two"
    body = {"echo": True, "logprobs": 2, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    (by_text,) = complete(client, prompt=prompt, **body)["choices"]
    assert complete(client, prompt=qwen3.tokenizer.encode(prompt), **body)["choices"] == [by_text]
    assert by_text["text"].startswith(prompt)
    assert by_text["logprobs"]["text_offset"][:6] == [0, 1, 2, 3, 4, 16]
    response = client.post("/v1/completions", json=body | {"prompt": prompt, "stream": True})
    parts = [event["choices"][0] for event in events(response.text)]
    assert "".join(part["text"] for part in parts) == by_text["text"]
    whole = by_text["logprobs"]
    joined = {name: [value for part in parts for value in part["logprobs"][name]] for name in whole}
    assert (joined["tokens"], joined["text_offset"]) == (whole["tokens"], whole["text_offset"])
    assert joined["token_logprobs"][1:] == pytest.approx(whole["token_logprobs"][1:], abs=1e-5)


def test_a_prompt_that_loses_its_blocks_is_scored_once(qwen3: Family) -> None:
    engine = qwen3.engine(num_blocks=12, block_size=4, max_num_batched_tokens=16, max_num_seqs=4)
    report = LogprobReport(3, with_prompt=True)
    engine.add(request("first", [5, 6, 7], 30))
    engine.add(request("scored", PROMPT, 20), report=report)
    run(engine, [])
    assert engine.scheduler.num_preempted
    expected = all_logprobs(PROMPT)
    assert [logprob for logprob, _ in report.prompt] == pytest.approx(
        [expected[at, token].item() for at, token in enumerate(PROMPT[1:])], abs=1e-4
    )
    assert [len(likeliest) for likeliest in report.completion] == [3] * 20


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_the_likeliest_tokens_are_those_of_the_reported_distribution(client: TestClient, temperature: float) -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "logprobs": True,
        "top_logprobs": 4,
        "max_tokens": 6,
        "ignore_eos": True,
        "temperature": temperature,
        "seed": 3,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    whole = client.post("/v1/chat/completions", json=body).json()
    (choice,) = whole["choices"]
    tokens = whole["prompt_token_ids"] + choice["token_ids"]
    expected = all_logprobs(tokens, temperature or 1.0)[len(whole["prompt_token_ids"]) - 1 : -1]
    for entry, row, token in zip(choice["logprobs"]["content"], expected, choice["token_ids"], strict=True):
        assert entry["logprob"] == pytest.approx(row[token].item(), abs=1e-4)
        assert [other["logprob"] for other in entry["top_logprobs"]] == pytest.approx(
            row.topk(4).values.tolist(), abs=1e-4
        )
        if row[token] == row.max():
            first = entry["top_logprobs"][0]
            assert {name: entry[name] for name in ("token", "logprob", "bytes")} == first
    parts = events(client.post("/v1/chat/completions", json=body | {"stream": True}).text)
    streamed = [entry for part in parts for entry in (part["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in choice["logprobs"]["content"]]
    assert [len(entry["top_logprobs"]) for entry in streamed] == [4] * 6


@pytest.mark.parametrize("make", [byte_level, metaspace], ids=lambda make: make.__name__)
@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_a_response_s_tokens_are_its_text(qwen3: Family, tmp_path: Path, make: Any, stream: bool) -> None:
    """Characters of several tokens among them; the model is random, so its vocabulary may be any."""
    tokenizer = Tokenizer.from_folder(make(tmp_path / "t"))
    tokenizer.eos_token_ids = ()
    with local(create_app(qwen3.engine(), tokenizer, "tiny")) as client:
        for prompt in ([40, 50, 60], [41, 3]):
            body = {"prompt": prompt, "temperature": 5, "max_tokens": 100, "logprobs": 0, "seed": 4, "stream": stream}
            response = client.post("/v1/completions", json=body)
            parts = [event["choices"][0] for event in events(response.text)] if stream else response.json()["choices"]
            text = "".join(part["text"] for part in parts)
            body["return_tokens_as_token_ids"] = True
            response = client.post("/v1/completions", json=body)
            parts = [event["choices"][0] for event in events(response.text)] if stream else response.json()["choices"]
            ids = [int(token[9:]) for part in parts for token in part["logprobs"]["tokens"]]
            shown = [token for token in ids if token not in tokenizer.token_bytes.special_ids]
            spelled = [tokenizer.token_bytes.of(token, first=place == 0) for place, token in enumerate(shown)]
            assert b"".join(spelled).decode(errors="replace") == text
            offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
            assert offsets == sorted(offsets)
            assert offsets[-1] <= len(text)


def test_what_is_not_shown_has_no_bytes(client: TestClient, qwen3: Family) -> None:
    plain = run(qwen3.engine(), [request("r", "hello", 8)])["r"].token_ids
    body = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "temperature": 50, "max_tokens": 200}
    for skip in (True, False):
        fixed = body | {"skip_special_tokens": skip, "ignore_eos": True, "seed": 5}
        (choice,) = client.post("/v1/chat/completions", json=fixed).json()["choices"]
        entries = choice["logprobs"]["content"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == choice["message"]["content"]
        assert any(entry["token"] in SPECIALS for entry in entries)
    (ended,) = complete(client, prompt="hello", max_tokens=8, stop_token_ids=[plain[3]], logprobs=0)["choices"]
    assert len(ended["logprobs"]["tokens"]) == plain.index(plain[3]) + 1
    assert ended["text"] == "".join(ended["logprobs"]["tokens"][:-1])


def test_why_a_choice_stopped(client: TestClient, qwen3: Family) -> None:
    plain = run(qwen3.engine(), [request("r", "hello", 20)])["r"].token_ids
    text = qwen3.tokenizer.decode(list(plain), False)
    for body, reason in (
        ({"max_tokens": 3}, None),
        ({"stop_token_ids": [plain[2], 101]}, plain[2]),
        ({"stop": ["never said", text[4:6]]}, text[4:6]),
    ):
        for stream in (False, True):
            fixed = {"prompt": "hello", "temperature": 0, "max_tokens": 20, "ignore_eos": True, "stream": stream}
            response = client.post("/v1/completions", json=fixed | body)
            last = events(response.text)[-1]["choices"][0] if stream else response.json()["choices"][0]
            assert last["stop_reason"] == reason
            assert last["finish_reason"] == ("length" if reason is None else "stop")


def test_an_eos_token_is_no_stop_reason_and_a_hidden_stop_string_is(qwen3: Family, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen3.folder, tmp_path / "m")
    fixed = {"prompt": "hello", "max_tokens": 200, "temperature": 50, "seed": 3}
    with local(create_app(qwen3.engine(), Tokenizer.from_folder(folder), "tiny")) as client:
        (ended,) = client.post("/v1/completions", json=fixed | {"max_tokens": 250}).json()["choices"]
        assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", None)
        hidden = client.post("/v1/completions", json=fixed | {"stop": ["<|im_start|>"], "ignore_eos": True}).json()
        assert hidden["choices"][0]["stop_reason"] == "<|im_start|>"
