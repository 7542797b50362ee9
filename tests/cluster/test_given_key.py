"""A run and nodes that share no folder, only a key that both are given."""

import asyncio
import json
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from ductile.cli import main
from ductile.cluster import join as join_module
from ductile.cluster.cluster import StartFailed
from ductile.cluster.invitation import Invitation, NotInvited, invitation_of, json_file, key_file
from ductile.messages.workers import Done, Ping
from ductile.transport.curve import RunKey
from tests.cluster.joining import GONE_S, join, joined_cluster
from tests.transport.transports import eventually


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> RunKey:
    key = RunKey.new()
    monkeypatch.setenv("DUCTILE_CLUSTER_KEY", f"{key.secret}\n")
    return key


def test_a_node_joins_by_name_and_key_comes_again_and_leaves_when_its_machine_is_taken_away(
    tmp_path: Path, key: RunKey
) -> None:
    """As a pod does whose run is started anew in another one. The key is in no file and in no text."""

    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        agent = join(f"localhost:{port}", 0, "--again", "--wait-s", "100")
        try:
            first = joined_cluster(tmp_path, [0], 1, 1, head_is_node=False, port=port)
            async with first:
                assert await first.mailbox.ask(0, Ping(), 30) == Done()
                assert not key_file(tmp_path).exists()
                assert key.secret not in json_file(tmp_path).read_text() + first._how_to_join(1)
            second = joined_cluster(tmp_path, [0], 1, 1, head_is_node=False, port=port)
            async with second:
                second.ends_without(lambda slot: False)
                assert await second.mailbox.ask(0, Ping(), 30) == Done()
                assert first._token != second._token, "slots of an earlier start are strangers"
                agent.send_signal(signal.SIGTERM)
                await eventually(lambda: second._remote[0].is_noticed)
                await second.leave([0])
                assert await asyncio.to_thread(agent.wait, GONE_S) == 130, "the run is not over"
        finally:
            agent.kill()
            said = agent.communicate()[1].decode()
        assert re.findall(r"The run is over|The machine was to be taken away, and its slots are empty", said) == [
            "The run is over",
            "The machine was to be taken away, and its slots are empty",
        ]
        assert key.secret not in said

    asyncio.run(asyncio.wait_for(story(), 115))


def test_the_folder_of_a_run_that_was_given_its_key_says_where_it_is_and_no_more(
    tmp_path: Path, key: RunKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file(tmp_path).write_text("the key of a run that was killed")
    Invitation("10.0.0.1:29400", 2, 2, key.public, key_is_given=True).write(tmp_path, key)
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.json"]
    assert invitation_of(str(tmp_path)) == ("10.0.0.1:29400", key)
    monkeypatch.setenv("DUCTILE_CLUSTER_KEY", RunKey.new().secret)
    assert invitation_of(str(tmp_path)) is None
    assert main(["join", str(tmp_path), "--wait-s", "0"]) == 2
    monkeypatch.delenv("DUCTILE_CLUSTER_KEY")
    with pytest.raises(NotInvited, match=r"no DUCTILE_CLUSTER_KEY, which the run of \S+ was given: set it to the same"):
        invitation_of(str(tmp_path))


def test_an_old_cluster_json_is_read(tmp_path: Path) -> None:
    key = RunKey.new()
    Invitation("10.0.0.1:29400", 2, 2, key.public).write(tmp_path, key)
    written = json.loads(json_file(tmp_path).read_text())
    del written["key_is_given"]
    json_file(tmp_path).write_text(json.dumps(written))
    assert invitation_of(str(tmp_path)) == ("10.0.0.1:29400", key)


def test_a_given_key_that_is_none_is_refused_without_being_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUCTILE_CLUSTER_KEY", "changeme")
    with pytest.raises(
        StartFailed, match=r"DUCTILE_CLUSTER_KEY of the environment cannot be used: .*40 char"
    ) as raised:
        joined_cluster(tmp_path, [0, 1], 1, 2)
    assert "changeme" not in str(raised.value)


def test_a_new_key_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "--new-key"]) == 0
    text = capsys.readouterr().out
    assert RunKey.of(text).secret == text.strip()
    with pytest.raises(SystemExit):
        main(["join"])
    assert "write which run: its output_dir, or host:port" in capsys.readouterr().err


def test_a_name_that_is_not_known_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = [socket.gaierror(socket.EAI_NONAME, "Name or service not known")] * 2

    def towards(host: str, port: int) -> str:
        assert (host, port) == ("rl-0.rl", 29400)
        if unknown:
            raise unknown.pop()
        return "10.0.0.2"

    monkeypatch.setattr(join_module, "address_towards", towards)
    monkeypatch.setattr(join_module, "POLL_S", 0.01)

    async def own(seconds: float) -> str:
        return await join_module._own_address("", "rl-0.rl:29400", time.monotonic() + seconds, asyncio.Event())

    assert asyncio.run(own(60)) == "10.0.0.2"
    unknown.append(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    with pytest.raises(NotInvited, match=r"to rl-0\.rl:29400 \(Name or service not known\)"):
        asyncio.run(own(-1))
