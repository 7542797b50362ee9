"""`ductile inference --bench`: rounds of requests to a server, the first ones to warm up, and a table of the others.

All requests of a round are sent at once, as token ids, and each response is streamed and has exactly the tokens that it
may have. So every token has gone through HTTP, the engine and back, and every round is the same work.
"""

import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import httpx
from rich.table import Table

from ductile.concurrency.structured import gather_all
from ductile.config.schema.bench import BenchConfig, Load
from ductile.orchestrator.commands.bench import GIB, origin, shown, spread
from ductile.roles import Late, Refused, SlotLost

RESPONSE_S = 600.0
"""The server may be silent for so long."""
DATA, DONE = "data: ", "[DONE]"
PEAK = "ductile_peak_memory_bytes"


@dataclass(frozen=True, slots=True)
class RequestTimes:
    first_token_s: float
    """Seconds from sending the request to its first token."""
    latency_s: float
    """Seconds from sending the request to its last token."""


@dataclass(frozen=True, slots=True)
class BenchRound:
    number: int
    seconds: float
    load: Load
    responses: tuple[RequestTimes, ...]
    peak_bytes: float
    """The server's peak memory so far: on a GPU what its tensors took, else what its process had resident."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second of the whole round."""
        return self.load.num_requests * self.load.max_tokens / self.seconds

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.load.num_requests * self.load.prompt_tokens / self.seconds


async def run_rounds(
    url: str, load: Load, vocab_size: int, num_rounds: int, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[BenchRound]:
    """Each round as soon as it is over. Raises Refused, Late or SlotLost."""
    client = httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(RESPONSE_S, connect=10.0),
        limits=httpx.Limits(max_connections=None),
        transport=transport,
        trust_env=False,  # a proxy between a benchmark and its own server is never meant
    )
    async with client:
        for number in range(1, num_rounds + 1):
            draw = random.Random(number)
            prompts = [draw.choices(range(vocab_size), k=load.prompt_tokens) for _ in range(load.num_requests)]
            began_s = time.perf_counter()
            responses = await gather_all(*(_request(client, prompt, load.max_tokens) for prompt in prompts))
            yield BenchRound(number, time.perf_counter() - began_s, load, tuple(responses), await _peak_bytes(client))


async def _request(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> RequestTimes:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s, first_token_s, num_tokens = time.perf_counter(), 0.0, 0
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise Refused(
                    f"the server responded with {response.status_code}: {(await response.aread())[:500].decode()}"
                )
            async for line in response.aiter_lines():
                if line.startswith(DATA) and line != DATA + DONE:
                    first_token_s = first_token_s or time.perf_counter() - began_s
                    num_tokens = _usage(json.loads(line.removeprefix(DATA))) or num_tokens
    except httpx.TimeoutException:
        raise Late(f"the server was silent for {RESPONSE_S:g} s") from None
    except httpx.TransportError as error:
        raise SlotLost(f"the server cannot be reached: {error or type(error).__name__}") from error
    if num_tokens != max_tokens:
        raise Refused(f"the server responded with {num_tokens} tokens, and was asked for {max_tokens}")
    return RequestTimes(first_token_s, time.perf_counter() - began_s)


def _usage(event: dict[str, Any]) -> int:
    """The tokens of the whole response, which only the last event has; else 0."""
    if "error" in event:
        raise Refused(f"the server failed: {event['error']['message']}")
    return int((event.get("usage") or {}).get("completion_tokens", 0))


async def _peak_bytes(client: httpx.AsyncClient) -> float:
    try:
        lines = (await client.get("/metrics")).text.splitlines()
    except httpx.HTTPError as error:
        raise SlotLost(f"the server cannot be reached: {error or type(error).__name__}") from error
    return next((float(line.split()[-1]) for line in lines if line.startswith(PEAK)), 0.0)


class ServingBench:
    """Rounds of a benchmark of a server, without those that warmed up."""

    def __init__(self, load: Load, asked: BenchConfig, config: Mapping[str, Any]) -> None:
        """config: the whole one, for the figures."""
        self._load, self._asked, self._config = load, asked, config
        self._rounds: list[BenchRound] = []

    def add(self, found: BenchRound) -> None:
        if found.number > self._asked.warmup_steps:
            self._rounds.append(found)

    def figures(self) -> dict[str, Any]:
        """What `bench.output_json` holds: the keys of the other commands' benchmarks, and a server's own."""
        return {
            "mfu": None,
            "mfu_reason": "a server trains nothing",
            "throughput": spread([each.tokens_per_s for each in self._rounds]),
            "prompt_throughput": spread([each.prompt_tokens_per_s for each in self._rounds]),
            "time_to_first_token": _times(
                [response.first_token_s for each in self._rounds for response in each.responses]
            ),
            "latency": _times([response.latency_s for each in self._rounds for response in each.responses]),
            "step_time": spread([each.seconds for each in self._rounds]),
            "peak_memory": {"gib": max((each.peak_bytes for each in self._rounds), default=0.0) / GIB},
            "steps": len(self._rounds),
            "warm_up_steps": self._asked.warmup_steps,
            "load": asdict(self._load),
            **origin(self._config),
        }

    def table(self) -> Table:
        table = Table(title="Benchmark", title_justify="left")
        for column in ("Round", "Tokens/s", "Prompt Tokens/s", "First Token", "Latency", "Seconds", "Peak Memory"):
            table.add_column(column, justify="right")
        for each in self._rounds:
            table.add_row(
                str(each.number),
                f"{each.tokens_per_s:,.0f}",
                f"{each.prompt_tokens_per_s:,.0f}",
                f"{fmean(response.first_token_s for response in each.responses):.3f} s",
                f"{fmean(response.latency_s for response in each.responses):.3f} s",
                f"{each.seconds:.2f}",
                f"{each.peak_bytes / GIB:.2f} GiB",
            )
        figures = self.figures()
        table.add_section()
        table.add_row(
            "Overall",
            shown(figures["throughput"], ",.0f"),
            shown(figures["prompt_throughput"], ",.0f"),
            shown(figures["time_to_first_token"], ".3f", "s"),
            shown(figures["latency"], ".3f", "s"),
            shown(figures["step_time"], ".2f"),
            f"{figures['peak_memory']['gib']:.2f} GiB",
        )
        return table


def _times(seconds: Sequence[float]) -> dict[str, float]:
    """Spread and median over all completions, so that the slowest count too."""
    return spread(seconds) | {"median": median(seconds)} if seconds else spread(seconds)
