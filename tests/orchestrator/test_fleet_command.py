"""`ductile fleet` over a real socket: what is asked for, what is said of it, and with which exit code."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ductile.cli import main
from ductile.messages.control import FleetRequest, FleetServer, FleetStatus, RunFailed, Unfit
from ductile.orchestrator.control.endpoint import Endpoint

SERVERS = (
    FleetServer("10.0.0.7:8000", "http://10.0.0.7:8000", "ready", "it has committed version 3", 12.3, 3, 8),
    FleetServer("10.0.0.8:8000+1", "http://10.0.0.8:8000", "stale", "its digest differs", 1.0, None, 0),
)


@contextmanager
def live(folder: Path, asked: list[FleetRequest]) -> Iterator[None]:
    """A run that has two servers, in a thread of its own."""
    loop, ended = asyncio.new_event_loop(), asyncio.Event()
    ready = threading.Event()

    async def respond(ask):
        asked.append(ask)
        if ask.server == "http://nowhere:1":
            raise RunFailed("http://nowhere:1 is not in the fleet: nobody listens there")
        if ask.server == "nobody":
            raise Unfit("nobody is none of the run's servers")
        return FleetStatus(7, 3, SERVERS, under_way="version 4", sentence="Done." if ask.server else "")

    async def serve() -> None:
        async with Endpoint(folder, respond):
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait(60)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(60)
        loop.close()


@pytest.mark.parametrize("words", [[], ["list"]])
def test_the_servers_are_listed_with_their_states_and_why(words, tmp_path, capsys):
    asked = []
    with live(tmp_path, asked):
        assert main(["fleet", str(tmp_path), *words]) == 0
    assert asked == [FleetRequest("list")]
    said = capsys.readouterr().out
    assert said.startswith("servers: 2, membership epoch 7, version 3 (under way: version 4)")
    for server in SERVERS:
        (line,) = [line for line in said.splitlines() if line.startswith(f"{server.id} ")]
        assert server.status in line
        assert server.reason in line


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["join", "http://10.0.0.9:8000"], 0, "Done."),
        (["drain", "10.0.0.7:8000"], 0, "Done."),
        (["evict", "10.0.0.7:8000"], 0, "Done."),
        (["join", "http://nowhere:1"], 1, "nobody listens there"),
        (["evict", "nobody"], 2, "none of the run's servers"),
    ],
)
def test_servers_come_and_go_as_they_are_told(words, code, said, tmp_path, capsys):
    asked = []
    with live(tmp_path, asked):
        assert main(["fleet", str(tmp_path), *words]) == code
    assert asked == [FleetRequest(*words)]
    printed = capsys.readouterr()
    assert said in (printed.err if code else printed.out)


@pytest.mark.parametrize("words", [["join"], ["drain"], ["list", "10.0.0.7:8000"], ["restart", "x"]])
def test_half_a_command_is_refused_before_the_run_is_asked(words, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["fleet", str(tmp_path), *words])
    assert caught.value.code == 2
    assert "ductile fleet" in capsys.readouterr().err
