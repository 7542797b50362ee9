"""Real servers and a real router before them, and clients that ask many things at a time."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.generator.test_serve import server

ROUTER_S = 60
WATCH = ("--health-check-interval-seconds", "0.5", "--probe-timeout-seconds", "0.4")


@dataclass
class RealReplica:
    url: str
    process: "subprocess.Popen[str]"


@contextmanager
def real_replicas(folder: Path, tmp_path: Path, number: int, **settings: Any) -> Iterator[list[RealReplica]]:
    with ExitStack() as stack:
        found: list[RealReplica] = []
        for index in range(number):
            (own := tmp_path / f"server-{index}").mkdir()
            # Their control tokens are where the router looks for them.
            found.append(RealReplica(*stack.enter_context(server(folder, own, token_folder=tmp_path, **settings))))
        try:
            yield found
        finally:
            for each in found:
                each.process.send_signal(signal.SIGCONT)


@contextmanager
def real_router(
    urls: Sequence[str], tmp_path: Path, *flags: str, prefill: Sequence[str] = ()
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A process and its URL."""
    words = [sys.executable, "-m", "ductile", "router", "--server.port", "0", "--urls", *urls, *WATCH, *flags]
    words += ["--prefill-urls", *prefill] if prefill else []
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    with (tmp_path / "router.log").open("w") as log:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("routing to "), line + (tmp_path / "router.log").read_text()
        url = line.split()[-1]
        wait_for_all(url, len(urls) + len(prefill))
        yield url, process
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def wait_for_all(url: str, number: int) -> None:
    deadline = time.monotonic() + ROUTER_S
    while True:
        replicas = httpx.get(f"{url}/health", timeout=10).json()["servers"]
        if [each["status"] for each in replicas] == ["ready"] * number:
            return
        assert time.monotonic() < deadline, replicas
        time.sleep(0.1)


@dataclass(frozen=True)
class Answered:
    token_ids: list[int]
    seconds: float
    error: str = ""


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answered:
    """Ask for a completion, whole or streamed."""
    began, asked = time.monotonic(), {"return_token_ids": True, "ignore_eos": True} | body
    token_ids: list[int] = []
    try:
        if not body.get("stream"):
            reply = await client.post(f"{url}/v1/completions", json=asked)
            if reply.status_code != 200:
                return Answered([], time.monotonic() - began, reply.text)
            return Answered(reply.json()["choices"][0]["token_ids"], time.monotonic() - began)
        async with client.stream("POST", f"{url}/v1/completions", json=asked) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return Answered([], time.monotonic() - began, line)
                    token_ids += event["choices"][0]["token_ids"]
            if response.status_code != 200:
                return Answered([], time.monotonic() - began, f"{response.status_code}")
        return Answered(token_ids, time.monotonic() - began)
    except httpx.HTTPError as error:
        return Answered([], time.monotonic() - began, repr(error))


def client_of(timeout_s: float = 300.0) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=timeout_s, limits=limits, trust_env=False)


async def ask_all(url: str, bodies: Sequence[dict[str, Any]], at_once: int) -> list[Answered]:
    room = asyncio.Semaphore(at_once)
    async with client_of() as client:

        async def one(body: dict[str, Any]) -> Answered:
            async with room:
                return await ask(client, url, body)

        return await asyncio.gather(*map(one, bodies))
