"""`ductile rl` with a server besides its slot: it is found, gets each version, and leaves as it is told."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ductile.messages.control import RunFailed
from ductile.observe import read_jsonl
from ductile.orchestrator.control.control import Run
from tests.end_to_end.runs import write_config
from tests.fleet.server_processes import ServerProcesses

pytestmark = pytest.mark.slow


def test_a_server_generates_beside_a_slot_until_it_is_told_to_leave(model: Path, tmp_path: Path) -> None:
    file = write_config(tmp_path, model, max_steps=60, train=0, generate="1", score=0, interval=100)
    text = file.read_text().replace('actor = 0, rollout = "1", inference = 0', 'actor = 0, rollout = "1"')
    with ServerProcesses(model, tmp_path) as servers:
        (server,) = servers.start()
        registry = f'[inference]\nregistry = {{ type = "file", folder = "{servers.registry}" }}\n'
        file.write_text(f"{text}\n{registry}topology_change_cooldown_seconds = 0\n")
        words = [sys.executable, "-m", "ductile", "rl", "@", str(file)]
        with (tmp_path / "rl.log").open("wb") as log:
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        try:
            run, id = Run(tmp_path / "run"), server.url.removeprefix("http://")
            until(lambda: steps(tmp_path) >= 2, process)
            (known,) = run.fleet().servers
            assert (known.id, known.status) == (id, "ready")
            until(lambda: run.status().fleet.servers[0].version >= 1, process)
            assert run.fleet("drain", id, timeout_s=100).sentence == f"{id} has left when it had finished what it had."
            left_at = steps(tmp_path)
            until(lambda: steps(tmp_path) > left_at, process)
        finally:
            process.terminate()
            process.wait(120)
        assert server.process.poll() is None, "it is not the run's to end"
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    updates = [event for event in events if event["kind"] == "weights_updated"]
    assert all(each["outcome"] == "committed" for update in updates for each in update["outcomes"])
    assert sum(bool(update["outcomes"]) for update in updates) >= 2
    assert {way["carrier"] for update in updates for way in update["carriers"].values()} == {"shared_memory"}
    assert [event["is_lost"] for event in events if event["kind"] == "server_left"] == [False]


def test_a_run_that_waits_for_servers_says_for_which_and_leaves_at_the_first_ctrl_c(
    model: Path, tmp_path: Path
) -> None:
    file = write_config(tmp_path, model, max_steps=60, train=0, generate="1", score=0, interval=100)
    file.write_text(file.read_text().replace('actor = 0, rollout = "1", inference = 0', "actor = 0"))
    with socket.create_server(("127.0.0.1", 0)) as taken:  # freed at the end: nobody listens there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    words = [sys.executable, "-m", "ductile", "rl", "@", str(file), "--orchestrator.client.base-url", url]
    with (tmp_path / "rl.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    try:
        until(lambda: f"waiting for servers: nobody listens at {url}" in (tmp_path / "rl.log").read_text(), process)
        (known,) = Run(tmp_path / "run").fleet().servers
        assert (known.id, known.status, known.reason) == (url, "absent", f"nobody listens at {url}")
        other = "127.0.0.1:9"
        with pytest.raises(RunFailed, match=f"nobody listens at http://{other}; it is looked for until it is evicted"):
            Run(tmp_path / "run").fleet("join", other)
        assert {each.id for each in Run(tmp_path / "run").fleet().servers} == {url, f"http://{other}"}
        Run(tmp_path / "run").fleet("evict", other)
        assert {each.id for each in Run(tmp_path / "run").fleet().servers} == {url}
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    finally:
        process.kill()


def test_a_registry_that_cannot_be_served_is_told_in_a_sentence_alone(model: Path, tmp_path: Path) -> None:
    file = write_config(tmp_path, model, max_steps=60, train=0, generate="1", score=0, interval=100)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        flags = ["--inference.registry.type", "http", "--inference.registry.url", url, "--inference.registry.serve"]
        words = [sys.executable, "-m", "ductile", "rl", "@", str(file), *flags]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 1
    assert "cannot be served here" in ended.stderr
    assert "never awaited" not in ended.stderr


def steps(folder: Path) -> int:
    return len(read_jsonl(folder / "run" / "metrics.jsonl"))


def until(condition, process) -> None:
    deadline_s = time.monotonic() + 150
    while not condition():
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
