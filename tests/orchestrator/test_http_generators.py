import asyncio
import json

import httpx
import pytest

from ductile.fleet import http_generators
from ductile.fleet.http_generators import HttpGenerators
from ductile.records import GenerateRequest, Sampling
from ductile.roles import Late, Refused, SlotLost

REQUEST = GenerateRequest(
    "r", (5, 6), Sampling(max_tokens=4, seed=9, top_k=3), generated=(7,), logprobs=(-1,), versions=(2,)
)


def response(**changes):
    choice = {"token_ids": [8, 2], "logprobs": {"token_logprobs": [-0.5, -0.25]}, "finish_reason": "stop"}
    return {"choices": [choice | changes]}


class Server:
    def __init__(self, *responses, models=None):
        self.models = {"data": [{"id": "tiny", "weight_version": 3}]} if models is None else models
        self.responses, self.bodies, self.headers = list(responses), [], None

    async def __call__(self, request):
        self.headers = request.headers
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json=self.models)
        self.bodies.append(json.loads(request.content))
        reply = self.responses.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, httpx.Response) else httpx.Response(200, json=reply)


def ask(server, api_key=None):
    async def go():
        transport = httpx.MockTransport(server)
        async with HttpGenerators("http://host:1/v1/", api_key, 5, 8, transport) as generators:
            return await generators.generate(REQUEST)

    return asyncio.run(go())


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    async def at_once(seconds):
        pass

    monkeypatch.setattr(http_generators.asyncio, "sleep", at_once)


def test_tokens_in_tokens_out():
    server = Server(response())
    generation = ask(server, api_key="secret")
    assert generation.token_ids == (7, 8, 2)
    assert generation.logprobs == (-1, -0.5, -0.25)
    assert generation.versions == (2, 3, 3)
    assert generation.finish_reason == "stop"
    body = server.bodies[0]
    assert body["prompt"] == [5, 6, 7]
    assert (body["max_tokens"], body["seed"], body["top_k"], body["model"]) == (3, 9, 3, "tiny")
    assert body["return_token_ids"]
    assert server.headers["authorization"] == "Bearer secret"


def test_an_overloaded_server_is_asked_again():
    server = Server(httpx.Response(503), httpx.ConnectError("refused"), response())
    assert ask(server).token_ids == (7, 8, 2)
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("replies", "error", "message"),
    [
        ([httpx.ReadTimeout("")], Late, r"http://host:1/v1/completions did not respond within 5 s"),
        ([httpx.ConnectError("refused")] * 3, SlotLost, "cannot be reached: refused"),
        ([httpx.Response(400, text="too long")], Refused, "responded with 400: too long"),
        ([httpx.Response(503, text="busy")] * 3, Refused, "responded with 503: busy"),
        ([httpx.Response(200, text="<html>")], Refused, "did not respond in JSON: '<html>'"),
        ([response(token_ids=None)], Refused, "gave no token ids with log-probs"),
        ([response(logprobs=None)], Refused, "gave no token ids with log-probs"),
        ([response(token_ids=[1, 2, 3])], Refused, "gave no token ids with log-probs"),
        ([response(token_ids=[1, 2**40])], Refused, "gave no token ids with log-probs"),
        ([{"choices": []}], Refused, "gave no token ids with log-probs"),
    ],
)
def test_what_can_go_wrong(replies, error, message):
    with pytest.raises(error, match=message):
        ask(Server(*replies))


def test_a_server_of_another_kind_is_refused_at_the_start():
    with pytest.raises(Refused, match="does not list a model: is this an OpenAI-compatible server"):
        ask(Server(models={"hello": "world"}))
