"""A router before servers that fail in every way that a client must not notice."""

import asyncio
import json
import signal
from collections import Counter
from typing import Any

import msgspec
import pytest
from starlette.responses import Response, StreamingResponse

from ductile.fleet.router.request_router import RequestRouter
from ductile.fleet.router.routed_request import COMPLETIONS, read_request
from ductile.fleet.router.router_server import StopSignals
from tests.router.stub_replicas import StubReplica, eventually, routed

DEADLINE_S = 90


async def ask(router: RequestRouter, session: str = "", **body: Any) -> Response:
    content = json.dumps({"prompt": [1, 2, 3], "max_tokens": 4} | body).encode()
    headers = {"x-session-id": session} if session else {}
    async with asyncio.timeout(DEADLINE_S):
        return await router.respond(read_request(COMPLETIONS, content, headers))


async def who(router: RequestRouter, session: str = "") -> str:
    response = await ask(router, session)
    assert response.status_code == 200, response.body
    return json.loads(response.body)["id"]


async def streamed(response: Response) -> list[dict[str, Any]]:
    assert isinstance(response, StreamingResponse)
    async with asyncio.timeout(DEADLINE_S):
        events = [bytes(event).removeprefix(b"data: ").strip() async for event in response.body_iterator]
    assert events.pop() == b"[DONE]"
    return [json.loads(event) for event in events]


def run(story: Any) -> None:
    asyncio.run(story())


def test_sessions_stay_and_others_are_spread() -> None:
    async def story() -> None:
        async with routed(*(StubReplica(name) for name in "abc"), policy="consistent_hash") as router:
            homes = {session: {await who(router, session) for _ in range(3)} for session in map(str, range(12))}
            assert all(len(homes[session]) == 1 for session in homes)
            assert len(set.union(*homes.values())) > 1
        async with routed(*(StubReplica(name) for name in "abc"), policy="round_robin") as router:
            assert Counter([await who(router) for _ in range(9)]) == {"a": 3, "b": 3, "c": 3}

    run(story)


def test_the_server_with_the_fewest_tokens_left_is_next() -> None:
    async def story() -> None:
        slow, quick = StubReplica("slow", is_mute=False), StubReplica("quick")
        async with routed(slow, quick) as router:
            servers = router.servers
            busy = read_request(COMPLETIONS, b'{"prompt": [1], "max_tokens": 90}', {})
            with servers.attempt(servers.all[slow.url], busy):
                assert {await who(router) for _ in range(4)} == {"quick"}
                metrics = router.metrics.render().decode()
            assert f'ductile_router_attempts_total{{outcome="done",replica="{quick.url}"}} 4.0' in metrics
            assert f'ductile_router_outstanding_tokens{{replica="{slow.url}"}} 90.0' in metrics

    run(story)


@pytest.mark.parametrize("status", [500, 503])
def test_what_one_server_does_not_take_another_one_does(status: int) -> None:
    async def story() -> None:
        bad, good = StubReplica("bad", status=status), StubReplica("good")
        async with routed(bad, good, policy="round_robin") as router:
            assert {await who(router) for _ in range(4)} == {"good"}
            assert bad.bodies
            good.status = status
            assert (await ask(router)).status_code == status  # both say so

    run(story)


def test_what_a_server_refuses_is_not_asked_again() -> None:
    async def story() -> None:
        first, second = StubReplica("first", status=400), StubReplica("second", status=400)
        async with routed(first, second) as router:
            assert (await ask(router)).status_code == 400
            assert len(first.bodies) + len(second.bodies) == 1

    run(story)


def test_a_stream_goes_on_at_another_server_from_the_tokens_that_it_has() -> None:
    async def story() -> None:
        first, second = StubReplica("first", breaks_after=2), StubReplica("second", breaks_after=1)
        third = StubReplica("third")
        async with routed(first, second, third, policy="round_robin") as router:
            chunks = await streamed(await ask(router, stream=True, max_tokens=6))
            assert "".join(each["choices"][0]["text"] for each in chunks) == "<3><4><5><6><7><8>"
            assert len({each["id"] for each in chunks}) == 1
            assert not any("token_ids" in each["choices"][0] or "prompt_token_ids" in each for each in chunks)
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            assert sum(len(stub.bodies) for stub in (first, second, third)) == 3
            going_on = [body for stub in (first, second, third) for body in stub.bodies if "num_generated" in body]
            assert {body["num_generated"] for body in going_on} in ({1, 3}, {2, 3})

    run(story)


def test_a_stream_that_cannot_go_on_ends_with_an_error() -> None:
    async def story() -> None:
        first, second = StubReplica("first", breaks_after=2), StubReplica("second", breaks_after=2)
        async with routed(first, second) as router:
            chunks = await streamed(await ask(router, stream=True, n=2))
            assert len(chunks) == 3
            assert "is not begun again" in chunks[-1]["error"]["message"]

    run(story)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_a_server_that_falls_silent_are_asked_of_another(stream: bool) -> None:
    async def story() -> None:
        silent, good = StubReplica("silent"), StubReplica("good")
        async with routed(silent, good, policy="round_robin") as router:
            silent.is_mute = True
            responses = await asyncio.gather(*(ask(router, stream=stream) for _ in range(6)))
            for response in responses:
                if stream:
                    assert (await streamed(response))[-1]["choices"][0]["finish_reason"] == "length"
                else:
                    assert json.loads(response.body)["id"] == "good"
            assert silent.bodies
            assert router.servers.all[silent.url].status in ("dead", "suspect")
            silent.is_mute = False
            await eventually(lambda: router.servers.all[silent.url].is_serving)
            for _ in range(500):  # it is tried, and is well again
                if {await who(router) for _ in range(4)} == {"silent", "good"}:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("it gets no requests again")

    run(story)


def test_a_server_that_is_leaving_gets_nothing_new() -> None:
    async def story() -> None:
        leaving, good = StubReplica("leaving"), StubReplica("good")
        async with routed(leaving, good) as router:
            leaving.state = msgspec.structs.replace(leaving.state, leaving=True)
            await eventually(lambda: router.servers.all[leaving.url].status == "draining")
            assert {await who(router) for _ in range(4)} == {"good"}
            assert not leaving.bodies

    run(story)


def test_requests_wait_for_a_server_that_comes_back() -> None:
    async def story() -> None:
        only = StubReplica("only")
        async with routed(only) as router:
            router.servers.remove(only.url, "it has ended")
            waiting = asyncio.create_task(ask(router))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            router.servers.add(only.url)
            assert (await waiting).status_code == 200

    run(story)


def test_a_batch_system_s_notice_stops_a_router_and_does_not_insist() -> None:
    async def story() -> None:
        heard: list[tuple[bool, bool]] = []
        with StopSignals() as stop:
            for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(signum)
                await asyncio.sleep(0)
                async with asyncio.timeout(DEADLINE_S):
                    await stop.first.wait()
                    if signum == signal.SIGINT:
                        await stop.second.wait()
                heard.append((stop.first.is_set(), stop.second.is_set()))
        assert heard == [(True, False), (True, False), (True, False), (True, True)]

    run(story)
