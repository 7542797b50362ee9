"""`make router-trials`: four servers of unequal speed, one killed and one stopped, beside round robin under the same
load; and prefill apart from decode, with a decode server killed, beside one server."""

import asyncio
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ductile.cluster.cpu_cap import CapNotPermitted, CpuCap
from tests.generator.test_serve import metric
from tests.router.real_replicas import Answered, RealReplica, ask, ask_all, client_of, real_replicas, real_router
from tests.tiny import make_model_folder

SPEEDS = (0.5, 0.25, 0.125, 0.125)
"""Shares of a core that the servers have. The second one is killed, and the third one stopped."""
UTILIZATION = 0.35
"""Tokens that are asked for in a second, as a share of what all four sample."""
LASTS_S, KILLED_AT_S, STOPPED_AT_S = 40.0, 8.0, 12.0
BOUND = 0.7
SERVER: dict[str, Any] = {"max_num_seqs": 4}
"""So few at once, so that a server has a most of what it can do, and requests wait there."""
NUM_DISAGGREGATED = 100


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_servers_of_unequal_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model_folder(tmp_path / "model", "qwen3", hidden_size=256, intermediate_size=512)
    rate, p95 = 0.0, dict[str, float]()
    for policy in ("round_robin", "least_tokens"):
        (folder := tmp_path / policy).mkdir()
        with (
            real_replicas(
                model, folder, len(SPEEDS), model={"name": str(model), "max_model_len": 512}, **SERVER
            ) as replicas,
            real_router([each.url for each in replicas], folder, "--policy", policy) as (url, _),
        ):
            caps = _cap(replicas)
            try:
                rate = rate or UTILIZATION * asyncio.run(_tokens_per_s([each.url for each in replicas]))
                answers = asyncio.run(_load(url, rate, replicas))
            finally:
                for each in replicas:
                    each.process.kill()
                    each.process.wait(10)
                for cap in caps:
                    cap.close()
        assert [each.error for each in answers if each.error] == []
        p95[policy] = _quantile([each.seconds for each in answers], 0.95)
        with capsys.disabled():
            print(f"\n{policy}: {len(answers)} requests, {rate:.0f} tokens/s asked, p95 {p95[policy]:.2f} s")
    ratio = p95["least_tokens"] / p95["round_robin"]
    with capsys.disabled():
        print(f"p95 of least_tokens is {ratio:.2f} of round robin's (at most {BOUND})")
    assert ratio <= BOUND


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_prefill_apart_from_decode(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model", "qwen3")
    draw = random.Random(4)
    bodies: list[dict[str, Any]] = []
    for number in range(NUM_DISAGGREGATED):
        prompt = [draw.randrange(5, 90) for _ in range(draw.randrange(2, 200))]
        sampling = {"temperature": 0} if number % 2 else {"seed": number}
        bodies.append({"prompt": prompt, "max_tokens": draw.randrange(1, 40), "stream": number % 3 == 0, **sampling})
    with real_replicas(model, tmp_path, 3) as (prefill, decode, killed):
        expected = asyncio.run(ask_all(decode.url, bodies, at_once=8))
        urls = [decode.url, killed.url]
        with real_router(urls, tmp_path, "--policy", "least_tokens", prefill=[prefill.url]) as (url, _):

            async def story() -> list[Answered]:
                asking = asyncio.create_task(ask_all(url, bodies, at_once=8))
                while await asyncio.to_thread(metric, killed.url, 'kv_transfers_total{outcome="taken"}') < 5:
                    assert not asking.done(), "the decode server took nothing over"
                killed.process.kill()
                return await asking

            answers = asyncio.run(story())
        assert [each.error for each in answers if each.error] == []
        assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
        assert metric(prefill.url, 'kv_transfers_total{outcome="kept"}') >= NUM_DISAGGREGATED
        assert metric(decode.url, 'kv_transfers_total{outcome="taken"}') > 0


def _cap(replicas: list[RealReplica]) -> list[CpuCap]:
    caps: list[CpuCap] = []
    try:
        for number, (replica, speed) in enumerate(zip(replicas, SPEEDS, strict=True)):
            caps.append(CpuCap(speed))
            Path(caps[-1].group(number), "cgroup.procs").write_text(str(replica.process.pid))
    except (CapNotPermitted, OSError) as why:
        pytest.skip(f"needs permission to cap processes: {why}")
    return caps


async def _tokens_per_s(urls: list[str]) -> float:
    """Measure what all servers sample in a second, each for itself."""
    bodies = [{"prompt": f"warm up {number}", "max_tokens": 32} for number in range(16)]

    async def of_one(url: str) -> float:
        began = time.monotonic()
        answers = await ask_all(url, bodies, at_once=16)
        return sum(len(each.token_ids) for each in answers) / (time.monotonic() - began)

    return sum(await asyncio.gather(*map(of_one, urls)))


async def _load(url: str, tokens_per_s: float, replicas: list[RealReplica]) -> list[Answered]:
    """Ask at moments and for lengths that do not depend on how fast the answers come."""
    draw = random.Random(9)
    plan: list[tuple[float, dict[str, Any]]] = []
    at = 0.0
    while at < LASTS_S:
        length = min(128, max(4, round(draw.lognormvariate(3.3, 0.8))))
        plan.append((at, {"prompt": f"number {len(plan)}", "max_tokens": length, "stream": len(plan) % 2 == 0}))
        at += draw.expovariate(1.0) * length / tokens_per_s
    async with client_of() as client:

        async def one(at: float, body: dict[str, Any]) -> Answered:
            await asyncio.sleep(at)
            return await ask(client, url, body)

        async def fault(at: float, replica: RealReplica, signum: signal.Signals) -> None:
            await asyncio.sleep(at)
            replica.process.send_signal(signum)

        faults = [fault(KILLED_AT_S, replicas[1], signal.SIGKILL), fault(STOPPED_AT_S, replicas[2], signal.SIGSTOP)]
        *answers, _, _ = await asyncio.gather(*(one(at, body) for at, body in plan), *faults)
    return [each for each in answers if isinstance(each, Answered)]


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
