"""A prompt that one server computes, and another one goes on with: over shared memory, over HTTP, and not at all."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ductile.generator.engine.kv_transfer import RequestKV
from ductile.generator.server.kv_params import digest_of
from ductile.generator.server.kv_sharing import KVLeases, pieces_of
from ductile.messages.control_token import token_of
from tests.generator.conftest import Family
from tests.generator.test_serve import metric, server

PROMPT = [7 + number % 40 for number in range(150)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "seed": 5, "ignore_eos": True, "return_token_ids": True}
ASK: dict[str, Any] = {"kv_transfer_params": {"do_remote_decode": True}}


@pytest.fixture(scope="module")
def pair(qwen3: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URLs of a server that computes prompts and of one that goes on with them; their cache blocks differ."""
    folder = tmp_path_factory.mktemp("pair")
    with (
        pytest.MonkeyPatch.context() as patch,
        server(qwen3.folder, folder) as (prefill, _),
        server(qwen3.folder, folder, block_size=16) as (decode, _),
    ):
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield prefill, decode


def post(url: str, body: dict[str, Any], route: str = "/v1/completions") -> Any:
    headers = {"Authorization": f"Bearer {token_of(url)}"}
    reply = httpx.post(f"{url}{route}", json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def taken(url: str, outcome: str) -> float:
    return metric(url, f'kv_transfers_total{{outcome="{outcome}"}}')


def elsewhere(remote: dict[str, Any]) -> dict[str, Any]:
    return remote | {"host": "another machine"}


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda remote: remote, "taken"),
        (elsewhere, "taken"),
        (lambda remote: remote | {"location": "/proc/self/fd/9999"}, "taken"),  # it is fetched, then
        (lambda remote: elsewhere(remote) | {"fingerprint": 7}, "computed again"),
        (lambda remote: elsewhere(remote) | {"url": "http://127.0.0.1:9/kv/x"}, "computed again"),
        (lambda remote: elsewhere(remote) | {"num_bytes": remote["num_bytes"] - 4}, "computed again"),
        (lambda remote: remote | {"digest": "0" * 13}, "computed again"),
        (lambda remote: remote | {"tokens": "0" * 32}, "computed again"),
    ],
    ids=["memory", "http", "no-such-memory", "damaged", "nobody-there", "too-short", "other-weights", "other-tokens"],
)
def test_the_completion_is_what_one_server_says(
    pair: tuple[str, str], change: Callable[[dict[str, Any]], dict[str, Any]], outcome: str
) -> None:
    prefill, decode = pair
    expected = post(prefill, BODY)["choices"][0]["token_ids"]
    params = post(prefill, BODY | ASK)["kv_transfer_params"]
    assert params["remote"]["num_tokens"] == len(PROMPT)
    before = taken(decode, outcome)
    params["remote"] = change(params["remote"])
    assert post(decode, BODY | {"kv_transfer_params": params})["choices"][0]["token_ids"] == expected
    assert taken(decode, outcome) == before + 1


def test_several_choices_of_a_chat_share_what_was_computed(pair: tuple[str, str]) -> None:
    prefill, decode = pair
    body = {"messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 8, "n": 3, "seed": 1}
    expected = post(decode, body, "/v1/chat/completions")
    params = post(prefill, body | ASK, "/v1/chat/completions")["kv_transfer_params"]
    found = post(decode, body | {"kv_transfer_params": params}, "/v1/chat/completions")
    assert [each["message"] for each in found["choices"]] == [each["message"] for each in expected["choices"]]


def test_what_is_let_go_is_gone(pair: tuple[str, str]) -> None:
    prefill, decode = pair
    params = post(prefill, BODY | ASK)["kv_transfer_params"]
    url = params["remote"]["url"]
    assert len(httpx.get(url).content) == params["remote"]["num_bytes"]
    assert httpx.delete(url).status_code == 200
    assert httpx.get(url).status_code == 404
    before = taken(decode, "computed again")
    params["remote"] = elsewhere(params["remote"])
    assert post(decode, BODY | {"kv_transfer_params": params})["choices"][0]["finish_reason"] == "length"
    assert taken(decode, "computed again") == before + 1


def test_only_who_may_control_a_server_says_who_computes(pair: tuple[str, str]) -> None:
    for url in pair:
        reply = httpx.post(f"{url}/v1/completions", json=BODY | ASK)
        assert (reply.status_code, "control token" in reply.text) == (401, True)
    reply = httpx.post(
        f"{pair[0]}/v1/completions",
        json=BODY | {"kv_transfer_params": {"do_remote_prefill": True}},
        headers={"Authorization": f"Bearer {token_of(pair[0])}"},
    )
    assert (reply.status_code, "must have do_remote_decode" in reply.text) == (400, True)


def test_the_oldest_makes_room_and_leases_end(tmp_path: Path) -> None:
    cache = RequestKV(torch.arange(2 * 1 * 8 * 1 * 4, dtype=torch.float32).view(2, 1, 8, 1, 4), 3)

    async def story() -> None:
        kept_here = KVLeases(2 * cache.content.nbytes, lease_s=1000)
        kept = [await kept_here.keep(cache, range(8), "d", "http://127.0.0.1:1") for _ in range(3)]
        leases = [each.url.rpartition("/")[2] for each in kept if each is not None]
        assert [kept_here.find(lease) is not None for lease in leases] == [False, True, True]
        segment = kept_here.find(leases[1])
        assert segment is not None
        assert b"".join([piece async for piece in pieces_of(segment)]) == cache.content.numpy().tobytes()
        assert kept[1] is not None
        assert (kept[1].version, kept[1].tokens) == (3, digest_of(range(8)))
        kept_here.forget(leases[1])
        assert [piece async for piece in pieces_of(segment)] == []
        assert await KVLeases(cache.content.nbytes - 1).keep(cache, range(8), "d", "http://127.0.0.1:1") is None
        short = KVLeases(cache.content.nbytes, lease_s=0.01)
        lease = await short.keep(cache, range(8), "d", "http://127.0.0.1:1")
        assert lease is not None
        for _ in range(1000):
            if short.find(lease.url.rpartition("/")[2]) is None:
                break
            await asyncio.sleep(0.01)
        assert short.num_bytes == 0
        kept_here.close()

    asyncio.run(story())
