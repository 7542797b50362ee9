"""Servers over real sockets: what becomes of their requests when they break, and of what they say."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from ductile.core.instances.instances import InstanceId
from ductile.core.scheduling.orders import Migration
from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.servers.completion_stream import SampledSpan, StreamedPiece, strange_token
from ductile.fleet.servers.server_http import ServerDeadlines
from ductile.fleet.servers.server_port import ServerPort
from ductile.messages.updates import EndUpdate, LiveDigest, PauseServer, UpdateProgress
from ductile.messages.workers import DigestWeights, WeightDigests
from ductile.records import GenerateRequest, Generation, Manifest, Sampling
from ductile.roles import Failure, Interrupted, Late, NotTaken, Refused, SlotLost
from ductile.transport.deadlines import Deadlines
from tests.fleet.fake_server import DIGEST, VOCABULARY, FakeServer, token

LENGTH = 8
PATIENT = ServerDeadlines(connect_s=2, state_s=2, control_s=2, verify_s=2, silence_s=10)
HASTY = ServerDeadlines(connect_s=2, state_s=0.3, control_s=0.3, verify_s=0.3, silence_s=0.3)
NEXT = EndUpdate("u", 1, 1, "00000000000bb")


def request(number: int, max_tokens: int = 100) -> GenerateRequest:
    return GenerateRequest(f"r{number}", (number,), Sampling(max_tokens=max_tokens), group=f"g{number}")


class Fleet:
    """Fake servers, each behind a port, in one pool."""

    def __init__(self, servers: tuple[FakeServer, ...], pool: RemoteGenerators) -> None:
        self.servers, self.pool = servers, pool
        self.ports: list[ServerPort] = []
        self.ended: list[tuple[InstanceId, type[Failure] | None]] = []
        pool.on_ended.add(lambda id, failure, began_at: self.ended.append((id, failure and type(failure))))

    async def add(self, server: FakeServer, deadlines: ServerDeadlines = PATIENT, **keys: Any) -> ServerPort:
        port = ServerPort(server.url, deadlines=deadlines, vocab_size=VOCABULARY, **keys)
        await port.open()
        await self.pool.add_server(port)
        self.ports.append(port)
        return port

    def ask(self, number: int, max_tokens: int = 100) -> "asyncio.Task[Generation]":
        return asyncio.create_task(self.pool.generate(request(number, max_tokens)))

    async def some_tokens(self, num_tokens: int = 1) -> None:
        """Returns when a request has so many tokens."""
        await until(lambda: any(len(got) >= num_tokens for port in self.ports for got, _ in port._live.values()))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@asynccontextmanager
async def fleet(
    *servers: FakeServer, deadlines: ServerDeadlines = PATIENT, progress_s: float = 10, patience_s: float = 5
) -> AsyncGenerator[Fleet]:
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server.serving())
        made = Fleet(servers, RemoteGenerators(None, (), 4, 0, Deadlines(5, progress_s, patience_s, 20)))
        for server in servers:
            await made.add(server, deadlines)
        yield made
        for port in made.ports:
            await port.release()
        assert made.pool.unfinished() == ()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 100))


def is_whole(generation: Generation, number: int, length: int = LENGTH) -> bool:
    return generation.token_ids == tuple(token(number, place) for place in range(1, 1 + length))


NONSENSE = {"garbage", "more", "beyond", "negative", "nan", "minus_inf", "positive"}
"""What would end the trainer, or be trained on."""
LOST = {"die", "restart", "commit", "401", "403", *NONSENSE}
"""Faults after which the server is none of the fleet any more."""
BEGUN = {"die", "reset", "hang", "error", "restart", "commit", "abort", *NONSENSE}
"""Faults in the middle of a stream."""


@pytest.mark.parametrize("fault", [*sorted(BEGUN), "401", "403", "429", "500", "503"])
def test_whatever_a_server_does_each_request_ends_once_and_goes_on_with_what_it_has(fault: str) -> None:
    async def story() -> None:
        bad, good = FakeServer(fault=fault), FakeServer()
        async with fleet(bad, good, deadlines=HASTY if fault == "hang" else PATIENT) as made:
            generations = await asyncio.gather(*(made.ask(number) for number in range(6)))
            assert all(map(is_whole, generations, range(6)))
            assert all({*generation.versions} == {0} for generation in generations), "of committed weights alone"
            assert (bad.url not in {each.id for each in made.pool.all_instances}) == (fault in LOST)
            assert bad.bodies
            if fault in BEGUN:
                assert any(len(body["prompt"]) == 1 + bad.at for body in good.bodies), "what was sampled is not again"
                assert all(len(body["prompt"]) <= 1 + bad.at for body in good.bodies), "nothing later was taken"
            assert (InstanceId(bad.url), None) not in made.ended

    run(story())


@pytest.mark.parametrize(
    ("token_id", "logprob", "version", "said"),
    [
        (9, 1e-6, 3, ""),
        (0, 0.0, 0, ""),
        (10, -1.0, 3, "the token id 10, and the model's are from 0 to 9"),
        (-1, -1.0, 3, "the token id -1, and the model's are from 0 to 9"),
        (1, 0.01, 3, "the log-prob 0.01, and the logarithm of a probability is finite and at most 0"),
        (1, float("nan"), 3, "the log-prob nan, and the logarithm of a probability is finite and at most 0"),
        (1, float("-inf"), 3, "the log-prob -inf, and the logarithm of a probability is finite and at most 0"),
        (1, -1.0, -1, "tokens of version -1, which no weights have"),
        (1, -1.0, 1 << 40, "tokens of version 1099511627776, which no weights have"),
    ],
)
def test_tokens_that_no_model_samples_are_told_from_others(
    token_id: int, logprob: float, version: int, said: str
) -> None:
    piece = StreamedPiece([1, token_id], [-2.0, logprob], [SampledSpan(version, DIGEST, 2)], None, "")
    assert strange_token(piece, 10) == said


def test_of_a_server_that_another_process_took_the_place_of_no_token_is_taken() -> None:
    """Though it may have the very same version, by its number."""

    async def story() -> None:
        server = FakeServer(fault="restart", times=1)
        async with fleet(server, patience_s=0.2) as made:
            with pytest.raises(Late, match=r"is another process now \(incarnation 'second'\)"):
                await made.ask(1)
            assert made.ended[0] == (server.url, SlotLost)

    run(story())


def test_a_request_waits_for_a_server_that_comes_back_and_goes_on_there() -> None:
    async def story() -> None:
        server = FakeServer(fault="die")
        async with fleet(server) as made:
            task = made.ask(1)
            await until(lambda: not made.pool.instances)
            again = FakeServer(port=server.port, incarnation="second")
            async with again.serving():
                await made.add(again)
                assert is_whole(await task, 1)
                assert [len(body["prompt"]) for body in again.bodies] == [1 + server.at]

    run(story())


def test_a_request_that_ends_server_after_server_without_any_progress_fails() -> None:
    async def story() -> None:
        async with fleet(*(FakeServer(fault="error", at=0) for _ in range(6))) as made:
            with pytest.raises(SlotLost, match="5 generators were lost while they had r1"):
                await made.ask(1)

    run(story())


def test_a_request_goes_on_however_many_servers_are_lost_with_it_as_long_as_it_comes_further() -> None:
    async def story() -> None:
        async with fleet(*(FakeServer(fault="die", at=1) for _ in range(7)), FakeServer()) as made:
            assert is_whole(await made.ask(1), 1)

    run(story())


def test_requests_of_a_server_that_makes_no_progress_go_elsewhere_and_it_is_asked_last() -> None:
    async def story() -> None:
        hung, good = FakeServer(fault="hang"), FakeServer()
        async with fleet(hung, good, progress_s=1.0) as made:
            tasks = [made.ask(number) for number in range(4)]
            assert all(map(is_whole, await asyncio.gather(*tasks), range(4)))
            num_bodies = len(hung.bodies)
            assert is_whole(await made.ask(4), 4)
            assert len(hung.bodies) == num_bodies

    run(story())


def test_the_only_server_is_asked_again_when_it_made_no_progress_for_a_while() -> None:
    async def story() -> None:
        async with fleet(FakeServer(fault="hang", times=1), progress_s=0.3) as made:
            assert is_whole(await made.ask(1), 1)

    run(story())


def test_of_32_requests_none_is_lost_when_a_server_is_removed_and_capacity_follows() -> None:
    async def story() -> None:
        first, second = FakeServer(token_s=0.01), FakeServer(token_s=0.01)
        async with fleet(first, second) as made:
            tasks = [made.ask(number) for number in range(32)]
            await made.some_tokens(2)
            assert made.pool.capacity == 8
            await made.pool.remove_server(InstanceId(first.url), "it is evicted")
            assert made.pool.capacity == 4
            assert all(map(is_whole, await asyncio.gather(*tasks), range(32)))
            assert not any(failure is SlotLost for _, failure in made.ended), "no request is to blame for it"

    run(story())


def test_a_server_that_is_drained_keeps_what_it_has() -> None:
    async def story() -> None:
        first, second = FakeServer(token_s=0.01), FakeServer(token_s=0.01)
        async with fleet(first, second) as made:
            tasks = [made.ask(number) for number in range(4)]
            await made.some_tokens()
            await made.pool.dismiss(made.ports[0].instance)
            assert all(map(is_whole, await asyncio.gather(*tasks), range(4)))
            assert {len(body["prompt"]) for body in second.bodies} == {1}

    run(story())


def test_requests_migrate_between_servers_and_aborted_ones_are_not_generated() -> None:
    async def story() -> None:
        first, second = FakeServer(60, token_s=0.01), FakeServer(60, token_s=0.01)
        async with fleet(first, second) as made:
            tasks = [made.ask(number) for number in range(2)]
            await made.some_tokens(3)
            (moved,) = [each for each in made.pool.unfinished() if each.instance == first.url]
            order = Migration(moved.id, InstanceId(first.url), InstanceId(second.url), with_cache=True)
            (result,) = await made.pool.migrate([order])
            assert (result.instance, result.with_cache, result.why) == (second.url, False, "")
            kept = int(moved.id[1:])
            tasks[1 - kept].cancel()
            assert is_whole(await tasks[kept], kept, 60)
            await until(lambda: second.num_aborted + first.num_aborted == 2)

    run(story())


def test_tokens_of_a_version_that_is_being_committed_are_taken_before_its_reply_is_here() -> None:
    async def story() -> None:
        server = FakeServer(fault="commit")
        committed = asyncio.Event()

        async def reply() -> tuple[int, Any]:
            await committed.wait()
            return 200, msgspec.to_builtins(UpdateProgress("u", "committed", digest=NEXT.digest))

        server.replies["/weights/commit"] = reply
        async with fleet(server) as made:
            committing = asyncio.create_task(made.ports[0].commit(NEXT))
            await asyncio.sleep(0)
            generation = await made.ask(1)
            assert list(generation.versions) == [0] * 3 + [1] * 5
            committed.set()
            await committing
            assert (made.ports[0].version, made.ports[0].digest) == (1, NEXT.digest)
            await made.pool.receive(Manifest(1, "none", "", 0, 0, ()))
            assert (made.pool.version, len(made.pool.instances)) == (1, 1)

    run(story())


def test_tokens_of_a_commit_of_which_nothing_is_heard_are_taken_until_the_update_ends_without_it() -> None:

    async def story() -> None:
        server = FakeServer(replies={"/weights/commit": never})
        async with fleet(server, deadlines=HASTY) as made:
            port = made.ports[0]
            with pytest.raises(Late, match="/weights/commit did not respond"):
                await port.commit(NEXT)
            assert port._is_trusted(NEXT.version, NEXT.digest)
            with pytest.raises(Refused):  # the fake server knows no such route
                await port.abort(NEXT)
            assert not port._is_trusted(NEXT.version, NEXT.digest)

    run(story())


@pytest.mark.parametrize(("mode", "drained"), [("keep", True), ("drain", True), ("drain", False)])
def test_a_server_may_drain_for_all_of_the_lease_and_keeps_what_has_not_ended_then(mode: Any, drained: bool) -> None:
    async def story() -> None:
        server = FakeServer()

        async def reply() -> tuple[int, Any]:
            told = server.control[-1][1]
            if told["mode"] == "drain":
                await asyncio.sleep(told["lease_s"] + 0.1)
            return 200, msgspec.to_builtins(replace(server.state, paused=drained or told["mode"] == "keep"))

        server.replies["/pause"] = reply
        async with fleet(server) as made:
            assert (await made.ports[0].pause(PauseServer(1, mode, lease_s=0.2))).paused
        assert [told["mode"] for _, told in server.control] == [mode] if drained else ["drain", "keep"]

    run(story())


def test_a_server_that_does_not_pause_is_not_taken_for_paused() -> None:
    async def story() -> None:
        server = FakeServer()
        server.replies["/pause"] = (200, msgspec.to_builtins(server.state))
        async with fleet(server) as made:
            with pytest.raises(Interrupted, match="says that it is not paused"):
                await made.ports[0].pause(PauseServer(1))

    run(story())


@pytest.mark.parametrize("is_late", [True, False])
def test_a_canary_that_nobody_waits_for_is_aborted_at_the_server(is_late: bool) -> None:
    async def story() -> None:
        server = FakeServer(token_s=0.02, length=1000)
        async with fleet(server) as made:
            made.pool._deadlines = Deadlines(0.1 if is_late else 5, 10, 5, 20)
            canary = asyncio.create_task(made.pool.canary(made.pool.instances[0], request(1, 2000)))
            await until(lambda: bool(made.ports[0]._live))
            if not is_late:
                canary.cancel()
            with pytest.raises(Late if is_late else asyncio.CancelledError):
                await canary
            await until(lambda: not made.ports[0]._live and server.num_aborted == 1)

    run(story())


def test_weights_are_read_with_the_control_token() -> None:
    """A server on loopback wants it for all that is below /weights, and no key for the rest."""

    def serve(asked: httpx.Request) -> httpx.Response:
        is_right = asked.headers.get("Authorization") == "Bearer t0ken"
        return httpx.Response(200 if is_right else 401, content=msgspec.json.encode(LiveDigest(1, "d")))

    async def story() -> None:
        port = ServerPort("http://host:1", control_token="t0ken", transport=httpx.MockTransport(serve))
        assert await port.ask(DigestWeights()) == WeightDigests(LiveDigest(1, "d"))
        await port.release()

    run(story())


async def never() -> tuple[int, Any]:
    await asyncio.sleep(60)
    return 200, {}


@pytest.mark.parametrize("has", [0, 1])
def test_a_commit_whose_reply_is_lost_is_known_once_the_state_says_so(has: int) -> None:
    async def story() -> None:
        server = FakeServer()
        server.replies["/weights/commit"] = never
        async with fleet(server, deadlines=HASTY) as made:
            port = made.ports[0]
            server.version, server.digest = (has, NEXT.digest if has else DIGEST)
            with pytest.raises(Late, match=r"/weights/commit did not respond within 0\.3 s"):
                await port.commit(NEXT)
            assert port.version == 0
            assert len(server.control) == 1, "it is not told twice"
            await port.state()
            assert (port.version, port.digest) == (has, NEXT.digest if has else DIGEST)

    run(story())


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        ((401, {}), Refused, "responded with 401"),
        ((403, {}), Refused, "wants another API key"),
        ((404, {}), Refused, "responded with 404"),
        ((409, {"error": "epoch 1 is over"}), Refused, "epoch 1 is over"),
        ((422, {}), Refused, "responded with 422"),
        ((500, {}), Interrupted, "responded with 500"),
        ((503, {}), NotTaken, "responded with 503"),
        ((200, {"hello": "world"}), Refused, "replied with no UpdateProgress"),
        ((200, b"<html>"), Refused, "replied with no UpdateProgress"),
        (never, Late, "did not respond within"),
    ],
)
def test_what_a_control_route_says_is_asked_once(reply: Any, error: type[Failure], message: str) -> None:
    async def story() -> None:
        server = FakeServer(replies={"/weights/verify": reply})
        async with server.serving():
            port = ServerPort(server.url, deadlines=HASTY)
            await port.open()
            with pytest.raises(error, match=message):
                await port.verify(NEXT)
            assert server.control == [("/weights/verify", msgspec.to_builtins(NEXT))]
            server.incarnation = "second"
            with pytest.raises(SlotLost, match="is another process now"):
                await port.state()
            server.die()
            with pytest.raises(SlotLost, match="cannot be reached"):
                await port.pause(PauseServer(1))
            await port.release()

    run(story())


@pytest.mark.parametrize("key", ["", "wr0ng-key"])
def test_a_key_is_asked_with_once_and_is_in_no_text(key: str, caplog: pytest.LogCaptureFixture) -> None:
    """Though the server repeats it, as some do."""

    async def story() -> None:
        server = FakeServer(key="s3cret-key")
        async with server.serving():
            caplog.set_level(logging.DEBUG)
            port = ServerPort(server.url, key or "s3cret-key", control_token="t0ken")
            if not key:
                await port.open()
                server.fault = "error"
                made = RemoteGenerators(None, (), 4, 0, Deadlines(5, 5, 5, 5))
                await made.add_server(port)
                with pytest.raises(Interrupted, match=r"this request of \.\.\. failed"):
                    await made.generate(request(1))
                server.key = "another"
            with pytest.raises(Refused, match="wants another API key") as raised:
                await port.open()
            with pytest.raises(Refused) as denied:
                await port.pause(PauseServer(1))
            told = [
                *map(str, (raised.value, denied.value)),
                repr(raised.value),
                repr(vars(port)),
                repr(vars(port._http._client)),
            ]
            assert not [secret for secret in ("s3cret-key", "wr0ng-key", "t0ken") if secret in str(told) + caplog.text]
            await port.release()

    run(story())


@pytest.mark.parametrize("url", ["http://user:s3cret@host:1", "http://host:1/v1?key=s3cret", "host:1", "ftp://host"])
def test_an_address_that_is_none_or_has_a_key_in_it_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"no address of a server|a key goes into api_key") as raised:
        ServerPort(url)
    assert "s3cret" not in str(raised.value)


def test_that_we_have_no_more_files_is_no_fault_of_the_server() -> None:
    async def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("all attempts failed") from OSError(24, "Too many open files")

    async def story() -> None:
        port = ServerPort("http://host:1", transport=httpx.MockTransport(refuse))
        with pytest.raises(NotTaken, match="could not be asked"):
            await port.open()
        await port.release()

    run(story())


def test_a_suspect_is_no_capacity_while_another_one_is_well() -> None:
    async def story() -> None:
        first, second = FakeServer(), FakeServer()
        async with fleet(first, second) as made:
            told: list[int] = []
            made.pool.on_change.add(lambda: told.append(made.pool.capacity))
            for server, why in ((first, "it is late"), (second, "it is late"), (first, ""), (second, "")):
                made.pool.suspect(InstanceId(server.url), why)
            assert told == [4, 8, 4, 8]

    run(story())


def test_a_suspect_gets_nothing_and_each_request_a_server_of_its_version() -> None:
    async def story() -> None:
        first, second, third = FakeServer(), FakeServer(), FakeServer()
        async with fleet(first, second, third, patience_s=0.3) as made:
            made.pool.suspect(InstanceId(first.url), "it missed a probe")
            assert all(map(is_whole, await asyncio.gather(*(made.ask(number) for number in range(6))), range(6)))
            assert (len(first.bodies), len(second.bodies), len(third.bodies)) == (0, 3, 3)
            made.pool.suspect(InstanceId(first.url), "HTTP 500", on_trial=True)
            assert all(map(is_whole, await asyncio.gather(*(made.ask(number) for number in range(7))), range(7)))
            assert (len(first.bodies), len(second.bodies), len(third.bodies)) == (1, 6, 6)
            made.pool.suspect(InstanceId(first.url), "")
            for server, port in ((first, made.ports[0]), (second, made.ports[1])):
                server.version, server.digest = 1, NEXT.digest
                server.replies["/weights/commit"] = 200, msgspec.to_builtins(UpdateProgress("u", "committed"))
                await port.commit(NEXT)
            asked = asyncio.create_task(made.pool.generate(request(9), versions=range(1, 2)))
            old = [asyncio.create_task(made.pool.generate(request(number), range(0, 1))) for number in range(3)]
            assert {version for each in await asyncio.gather(*old) for version in each.versions} == {0}
            await made.pool.receive(Manifest(1, "none", "", 0, 0, ()))
            assert {*(await asked).versions} == {1}
            assert {each.id for each in made.pool.instances} == {first.url, second.url}, "the third was not given it"
            with pytest.raises(Late, match="for request r1"):
                await made.pool.generate(request(1), range(7, 9))

    run(story())
