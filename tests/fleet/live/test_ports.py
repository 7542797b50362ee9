"""Ports to real server processes: what they have sampled is not lost with them, and no other process's is taken."""

import asyncio
import signal
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import Tensor

from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.servers.server_http import ServerDeadlines
from ductile.fleet.servers.server_port import ServerPort
from ductile.messages.control_token import token_of
from ductile.messages.updates import EndUpdate, LeaseVersion, PauseServer, PrepareUpdate, ResumeServer
from ductile.model.checkpoint import load_model
from ductile.records import GenerateRequest, Generation, Manifest, Sampling
from ductile.roles import Late, Refused, SlotLost
from ductile.transport.deadlines import Deadlines
from tests.generator.test_serve import server
from tests.generator.weight_giver import Giver, perturbed
from tests.tiny import make_model_folder

pytestmark = pytest.mark.fleet

DEADLINES = ServerDeadlines(connect_s=2, state_s=2, control_s=10, verify_s=10, silence_s=30)
NUM_TOKENS = 60


class Servers:
    """Real servers, which a test may end, stop and start again."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        self._folder, self._tmp_path, self._stack = folder, tmp_path, ExitStack()
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, port: int = 0) -> str:
        settings = {"server": {"port": port}, "max_num_seqs": 8}
        url, process = self._stack.enter_context(server(self._folder, self._tmp_path, **settings))
        self.processes[url] = process
        return url

    def token(self, url: str) -> str:
        token = token_of(url)
        assert token is not None
        return token

    def signal(self, url: str, number: int) -> None:
        self.processes[url].send_signal(number)

    def stop(self) -> None:
        for url in self.processes:
            self.signal(url, signal.SIGCONT)
        self._stack.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture
def servers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = Servers(folder, tmp_path)
    yield made
    made.stop()


class Fleet:
    def __init__(self, servers: Servers, urls: list[str], progress_s: float) -> None:
        self.servers, self.urls = servers, urls
        self.pool = RemoteGenerators(None, (), 8, 0, Deadlines(10, progress_s, 5, 60))
        self.ports: dict[str, ServerPort] = {}

    async def add(self, url: str) -> ServerPort:
        port = self.ports[url] = ServerPort(url, None, self.servers.token(url), DEADLINES)
        await port.open()
        await self.pool.add_server(port)
        return port

    def ask(self, number: int, seed: int | None = None, num_tokens: int = NUM_TOKENS) -> "asyncio.Task[Generation]":
        sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        prompt = (5 + number, 7, 11 + number)
        return asyncio.create_task(self.pool.generate(GenerateRequest(f"r{number}", prompt, sampling)))

    async def has_begun(self, url: str, num_tokens: int = 5) -> None:
        async with asyncio.timeout(20):
            while not any(len(partial) >= num_tokens for partial, _ in self.ports[url]._live.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)


def run(
    servers: Servers, num: int, story: Callable[[Fleet], Coroutine[Any, Any, None]], progress_s: float = 20
) -> None:
    async def whole() -> None:
        fleet = Fleet(servers, [servers.start() for _ in range(num)], progress_s)
        for url in fleet.urls:
            await fleet.add(url)
        await story(fleet)
        for port in fleet.ports.values():
            await port.release()

    asyncio.run(asyncio.wait_for(whole(), 100))


async def expected(fleet: Fleet, num: int) -> list[tuple[int, ...]]:
    """Completions when nothing goes wrong: they are greedy, so any server says the same."""
    return [tuple(each.token_ids) for each in await asyncio.gather(*(fleet.ask(number) for number in range(num)))]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_of_32_requests_none_is_lost_or_another_one_with_a_server(servers: Servers, number: int) -> None:
    async def story(fleet: Fleet) -> None:
        whole = await expected(fleet, 32)
        tasks = [fleet.ask(number) for number in range(32)]
        await fleet.has_begun(fleet.urls[0])
        servers.signal(fleet.urls[0], number)
        generations = await asyncio.gather(*tasks)
        assert [tuple(each.token_ids) for each in generations] == whole
        assert all({*each.versions} == {0} for each in generations)
        assert fleet.pool.capacity == 8, "what is stopped is suspect, and no capacity"
        more = [fleet.ask(number) for number in range(8)]
        await fleet.has_begun(fleet.urls[1])
        assert {each.instance for each in fleet.pool.unfinished()} == {fleet.urls[1]}, "none waits for it"
        assert [tuple(each.token_ids) for each in await asyncio.gather(*more)] == whole[:8]
        if number == signal.SIGSTOP:
            servers.signal(fleet.urls[0], signal.SIGCONT)
            state = await fleet.ports[fleet.urls[0]].state()
            assert state.incarnation == fleet.ports[fleet.urls[0]].incarnation
            assert not fleet.ports[fleet.urls[0]]._live

    run(servers, 2, story, progress_s=1.5)


def test_a_process_that_has_taken_a_server_s_port_is_not_taken_for_it(servers: Servers) -> None:
    async def story(fleet: Fleet) -> None:
        (url,) = fleet.urls
        servers.signal(url, signal.SIGKILL)
        servers.processes[url].wait(10)
        servers.start(int(url.rpartition(":")[2]))
        with pytest.raises(SlotLost, match="is another process now"):
            await fleet.ports[url].state()
        with pytest.raises(Late, match="is another process now"):
            await fleet.ask(1)
        await fleet.add(url)
        assert len((await fleet.ask(1)).token_ids) == NUM_TOKENS

    run(servers, 1, story)


def given(fleet: Fleet, url: str, weights: dict[str, Tensor], version: int) -> Giver:
    headers = {"Authorization": f"Bearer {fleet.servers.token(url)}"}
    return Giver(httpx.Client(base_url=url, headers=headers, timeout=30), perturbed(weights, version), version)


def test_a_version_is_committed_in_mid_generation_and_who_was_not_given_it_is_left_behind(
    servers: Servers, folder: Path
) -> None:
    weights = {name: each.data for name, each in load_model(folder).named_parameters()}

    async def story(fleet: Fleet) -> None:
        first = fleet.ports[fleet.urls[0]]
        tasks = [fleet.ask(number, num_tokens=400) for number in range(4)]
        await fleet.has_begun(first.url)
        giver = given(fleet, first.url, weights, 1)
        ends = EndUpdate(giver.update.update_id, giver.update.epoch, 1, giver.digest)
        await first.prepare(PrepareUpdate(giver.update, "http", tuple(giver.offers)))
        await asyncio.to_thread(giver.send_all)
        assert (await first.verify(ends)).digest == giver.digest
        assert (await first.commit(ends)).phase == "committed"
        await fleet.pool.receive(Manifest(1, "none", "", 0, 0, ()))
        assert [each.id for each in fleet.pool.instances] == [first.url]
        with pytest.raises(Refused, match="responded with 409"):
            await first.commit(EndUpdate("another", 0, 2))
        for generation in await asyncio.gather(*tasks):
            assert len(generation.token_ids) == 400
            assert list(generation.versions) == sorted(generation.versions)
            assert {*generation.versions} <= {0, 1}
            assert generation.versions[-1] == 1, "all have ended at the server that was given it"
        lease = await first.lease(LeaseVersion(1))
        assert (lease.version, lease.digest) == (1, first.digest)
        assert (await first.pause(PauseServer(giver.update.epoch))).paused
        assert not (await first.resume(ResumeServer())).paused

    run(servers, 2, story)
