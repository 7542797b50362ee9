"""Rollouts from servers that are not the run's, of any kind that understands `return_token_ids`."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from ductile.fleet.servers import http_generators
from ductile.fleet.servers.http_generators import HttpGenerators
from ductile.records import GenerateRequest, Manifest, Sampling
from ductile.roles import Failure, Interrupted, Late, Refused, SlotLost
from ductile.transport import http_client
from tests.fleet.fake_server import FakeServer, token

SAMPLING = Sampling(max_tokens=6, seed=9, top_k=3, stop_token_ids=(7,))
REQUEST = GenerateRequest("r", (5,), SAMPLING, generated=(token(5, 1),), logprobs=(-1,), versions=(2,), priority=2)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_generators, "PATIENCE_S", 0.3)
    monkeypatch.setattr(http_client, "FIRST_PAUSE_S", 0.01)


@asynccontextmanager
async def generators(
    *servers: FakeServer, api_key: str | None = None, timeout_s: float = 5
) -> AsyncGenerator[HttpGenerators]:
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server.serving())
        urls = [f"{server.url}/v1/" for server in servers]
        yield await stack.enter_async_context(HttpGenerators(urls, api_key, timeout_s, 3))


def test_tokens_in_tokens_out_and_all_of_sampling_is_said() -> None:
    async def story() -> None:
        server = FakeServer(plain=True, version=3, key="secret")
        async with generators(server, api_key="secret") as made:
            generation = await made.generate(REQUEST)
            assert made.capacity == 3
        assert generation.token_ids == tuple(token(5, place) for place in range(1, 7))
        assert generation.versions == (2, 3, 3, 3, 3, 3)
        assert generation.logprobs == (-1, *[-0.5] * 5)
        assert generation.finish_reason == "length"
        (body,) = server.bodies
        assert body == {
            "model": "tiny",
            "prompt": [5, token(5, 1)],
            "max_tokens": 5,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 3,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": [],
            "stop_token_ids": [7],
            "ignore_eos": False,
            "skip_special_tokens": True,
            "logprobs": 1,
            "return_token_ids": True,
            "stream": True,
            "seed": 9 * 1_000_003 + 1,
            "priority": -2,
        }

    asyncio.run(story())


def test_of_several_servers_one_does_what_another_cannot_end() -> None:
    async def story() -> None:
        first, second = FakeServer(plain=True, fault="die", at=2), FakeServer(plain=True)
        async with generators(first, second) as made:
            requests = [GenerateRequest(f"r{number}", (number,), Sampling(max_tokens=6)) for number in range(4)]
            generations = await asyncio.gather(*map(made.generate, requests))
            assert [each.token_ids for each in generations] == [
                tuple(token(number, place) for place in range(1, 7)) for number in range(4)
            ]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("server", "error", "message"),
    [
        (FakeServer(plain=True, fault="hang", at=0), Interrupted, r"/v1/completions did not respond within 0\.4 s"),
        (FakeServer(plain=True, fault="die", at=0), Late, "the last one was lost: the connection to .* was lost"),
        (FakeServer(plain=True, fault="400"), Refused, "responded with 400"),
        (FakeServer(plain=True, fault="503"), Refused, "responded with 503"),
        (FakeServer(plain=True, fault="401"), Late, "the last one was lost: .* wants another API key"),
        (FakeServer(plain=True, fault="text", at=0), Interrupted, "gave no token ids with log-probs"),
        (FakeServer(plain=True, fault="garbage", at=0), Late, "sent 2 tokens with 1 log-probs"),
        (FakeServer(plain=True, fault="error", at=0), Interrupted, "this request of  failed"),
        (FakeServer(plain=True, fault="more", at=0), Late, "more than the 6 tokens it was asked for"),
    ],
    ids=lambda value: value.fault if isinstance(value, FakeServer) else "",
)
def test_what_can_go_wrong(server: FakeServer, error: type[Failure], message: str) -> None:
    async def story() -> None:
        async with generators(server, timeout_s=0.4) as made:
            with pytest.raises(error, match=message):
                await made.generate(REQUEST)

    asyncio.run(story())


def test_an_overloaded_server_and_one_that_begins_late_are_asked_again() -> None:
    async def story() -> None:
        server = FakeServer(plain=True, fault="503", times=2)
        async with generators(server) as made:
            assert len((await made.generate(REQUEST)).token_ids) == 6
            assert len(server.bodies) == 3

    asyncio.run(story())


def test_what_is_no_server_is_refused_at_the_start() -> None:
    async def story() -> None:
        with pytest.raises(Refused, match="does not list a model: is this an OpenAI-compatible server"):
            async with generators(FakeServer(replies={"/v1/models": (200, {"hello": "world"})})):
                pass
        with pytest.raises(SlotLost, match="cannot be reached"):
            async with HttpGenerators(["http://127.0.0.1:9"]):
                pass

    asyncio.run(story())


def test_its_weights_are_its_own() -> None:
    async def story() -> None:
        async with generators(FakeServer(plain=True)) as made:
            with pytest.raises(Refused, match="servers of their own weights cannot receive version 1"):
                await made.receive(Manifest(1, "none", "", 0, 0, ()))

    asyncio.run(story())


def test_a_stop_string_that_may_have_begun_is_sampled_again() -> None:
    async def story() -> None:
        server = FakeServer(plain=True, fault="503", times=2)
        async with generators(server) as made:
            generated = tuple(token(5, place) for place in range(1, 6))
            request = replace(REQUEST, generated=generated, logprobs=[-1] * 5, versions=[2] * 5)
            generation = await made.generate(replace(request, sampling=replace(SAMPLING, stop=("ab", "xyz"))))
            assert [body["prompt"] for body in server.bodies] == [[5, *generated[:3]]] * 3
            assert generation.token_ids == (*generated, token(5, 6))
            assert generation.versions == (2, 2, 2, 0, 0, 0)

    asyncio.run(story())
