"""Rounds of requests to a server, and what is made of them."""

import asyncio
import json

import httpx
import pytest
from rich.console import Console

from ductile.config.schema.bench import InferenceBenchConfig, Load
from ductile.orchestrator.commands.bench import GIB, written
from ductile.orchestrator.commands.serving_bench import BenchRound, RequestTimes, ServingBench, run_rounds
from ductile.roles import Late, Refused, SlotLost

LOAD = Load(num_requests=3, prompt_tokens=5, max_tokens=4)


class Server:
    """Responds as ours does; `spoil` makes something else of a response."""

    def __init__(self, spoil=lambda response: response):
        self.spoil, self.bodies = spoil, []

    def __call__(self, request):
        if request.url.path == "/metrics":
            return httpx.Response(200, text=f"# HELP\nductile_peak_memory_bytes {2 * GIB}\nductile_other 1.0\n")
        assert request.url.path == "/v1/completions"
        self.bodies.append(body := json.loads(request.content))
        events = [{"choices": [{"text": "x"}], "usage": None} for _ in range(body["max_tokens"])]
        events.append({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        return self.spoil(httpx.Response(200, text=sse(*events)))


def sse(*events):
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def asked(server, num_rounds=3):
    async def ask():
        transport = httpx.MockTransport(server)
        return [found async for found in run_rounds("http://127.0.0.1:1", LOAD, 50, num_rounds, transport)]

    return asyncio.run(ask())


def test_every_round_is_the_same_work_and_no_two_prompts_are_alike():
    server = Server()
    rounds = asked(server)
    assert [found.number for found in rounds] == [1, 2, 3]
    assert [len(found.responses) for found in rounds] == [3, 3, 3]
    assert all(
        0 < response.first_token_s <= response.latency_s <= found.seconds
        for found in rounds
        for response in found.responses
    )
    assert all(found.peak_bytes == 2 * GIB for found in rounds)
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len({*prompts}) == len(prompts) == 9
    assert {len(prompt) for prompt in prompts} == {5}
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    assert all(body["ignore_eos"] and body["stream"] and body["max_tokens"] == 4 for body in server.bodies)


def _unreachable(response):
    raise httpx.ConnectError("connection refused")


def _silent(response):
    raise httpx.ReadTimeout("")


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lambda response: httpx.Response(503, text="no room"), Refused, "the server responded with 503: no room"),
        (
            lambda response: httpx.Response(200, text=sse({"error": {"message": "device lost"}})),
            Refused,
            "the server failed: device lost",
        ),
        (
            lambda response: httpx.Response(200, text=sse({"usage": {"completion_tokens": 3}})),
            Refused,
            "responded with 3 tokens, and was asked for 4",
        ),
        (_unreachable, SlotLost, "the server cannot be reached: connection refused"),
        (_silent, Late, "the server was silent for 600 s"),
    ],
)
def test_what_goes_wrong_is_told_once(spoil, error, said):
    with pytest.raises(error, match=said):
        asked(Server(spoil))


def test_the_first_round_is_not_counted(tmp_path):
    bench = ServingBench(LOAD, InferenceBenchConfig(), {"seed": 3})
    for number, seconds in ((1, 100.0), (2, 2.0), (3, 4.0)):
        responses = tuple(RequestTimes(0.1 * k * number, 0.5 * k * number) for k in (1, 2, 3))
        bench.add(BenchRound(number, seconds, LOAD, responses, peak_bytes=number * GIB))
    figures = bench.figures()
    assert (figures["steps"], figures["warm_up_steps"]) == (2, 1)
    assert figures["throughput"] == {"mean": 4.5, "std": 1.5, "min": 3.0, "max": 6.0}
    assert figures["prompt_throughput"]["max"] == 7.5
    assert figures["step_time"]["mean"] == 3.0
    assert figures["time_to_first_token"]["max"] == pytest.approx(0.9)
    assert figures["latency"]["median"] == pytest.approx(2.5)
    assert figures["peak_memory"]["gib"] == 3.0
    assert figures["load"] == {"num_requests": 3, "prompt_tokens": 5, "max_tokens": 4}
    assert figures["config"] == {"seed": 3}
    written(figures, bench.table(), str(tmp_path / "bench.json"))
    assert json.loads((tmp_path / "bench.json").read_text())["steps"] == 2
    console = Console(width=200, record=True)
    console.print(bench.table())
    shown = console.export_text()
    assert "4 ± 2 [3, 6]" in shown
    assert "0.400 s" in shown
