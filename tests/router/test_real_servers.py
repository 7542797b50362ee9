"""Two real servers behind a real router, one of which is killed under load: no client notices."""

import asyncio
import signal
from pathlib import Path

import httpx

from tests.router.real_replicas import ask_all, real_replicas, real_router
from tests.tiny import make_model_folder

NUM_REQUESTS = 16


def test_nothing_fails_when_a_server_is_killed(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model", "qwen3")
    bodies = [
        {"prompt": f"tell me of {number}", "max_tokens": 60, "seed": number, "stream": number % 2 == 0}
        for number in range(NUM_REQUESTS)
    ]
    with (
        real_replicas(model, tmp_path, 2) as (first, second),
        real_router([first.url, second.url], tmp_path) as (url, process),
    ):
        expected = asyncio.run(ask_all(first.url, bodies, at_once=NUM_REQUESTS))

        async def story() -> list[list[int]]:
            asking = asyncio.create_task(ask_all(url, bodies, at_once=NUM_REQUESTS))
            while (
                f'ductile_router_sequences{{replica="{second.url}"}} 0.0'
                in (await asyncio.to_thread(httpx.get, f"{url}/metrics")).text
            ):
                assert not asking.done(), "the second server got no request"
            second.process.kill()
            answers = await asking
            assert [each.error for each in answers if each.error] == []
            return [each.token_ids for each in answers]

        assert asyncio.run(story()) == [each.token_ids for each in expected]
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == str(model)
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(30) == 0
