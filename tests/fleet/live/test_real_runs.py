"""Real runs of the quickstart on real servers: found by a registry that the run serves, weights by each way."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ductile.observe import read_jsonl
from tests.fleet.server_processes import ServerProcesses

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "examples" / "quickstart"
RUN_S = 400.0
ELSEWHERE = 'from ductile.fabric import process\n\nprocess.host = lambda: "elsewhere"\n'
"""Done by each process that begins with it: it says that it is on another machine."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def write_config(folder: Path, fleet: str, slots: str = "") -> Path:
    """The quickstart in small. slots: roles besides the trainer's."""
    text = (QUICKSTART / "rl.toml").read_text()
    for was, now in {
        'rollout = "1-2"\ninference = 3\n': slots,
        "batch_size = 128": "batch_size = 32",
        'output_dir = "runs/quickstart"': f'output_dir = "{folder / "run"}"',
        'name = "examples/quickstart/model"': f'name = "{QUICKSTART / "model"}"',
    }.items():
        assert was in text
        text = text.replace(was, now)
    file = folder / "rl.toml"
    file.write_text(f"{text}\n[inference]\ntopology_change_cooldown_seconds = 0\n{fleet}")
    return file


@contextmanager
def running(file: Path, *flags: str) -> Generator["subprocess.Popen[bytes]"]:
    words = [sys.executable, "-m", "ductile", "rl", "@", str(file), "--no-orchestrator.eval.enabled", *flags]
    with (file.parent / "rl.log").open("wb") as log:
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def until(condition: Callable[[], bool], file: Path) -> None:
    deadline_s = time.monotonic() + RUN_S
    while not condition():
        assert time.monotonic() < deadline_s, (file.parent / "rl.log").read_text()[-3000:]
        time.sleep(0.2)


def rows(file: Path, name: str) -> list[dict[str, Any]]:
    return read_jsonl(file.parent / "run" / name)


def of_kind(file: Path, kind: str) -> list[dict[str, Any]]:
    return [each for each in rows(file, "events.jsonl") if each["kind"] == kind]


@pytest.mark.parametrize("join", ["disk", "http"])
def test_versions_go_by_http_and_one_that_joins_gets_the_live_one(tmp_path: Path, join: str) -> None:
    """By files, or from the other server. The servers say that they are on another machine, so HTTP is all there is."""
    url = f"http://127.0.0.1:{free_port()}"
    registry = f'registry = {{ type = "http", url = "{url}", serve = true, ttl_seconds = 3 }}\n'
    file = write_config(tmp_path, f'{registry}join_transport = "{join}"\n')
    flags = ("--registry.type", "http", "--registry.url", url)
    (tmp_path / "sitecustomize.py").write_text(ELSEWHERE)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with ServerProcesses(QUICKSTART / "model", tmp_path) as servers:
        servers.begin(*flags, PYTHONPATH=path)
        with running(file, "--max-steps", "300"):
            until(lambda: len(rows(file, "metrics.jsonl")) >= 1, file)
            servers.begin(*flags, PYTHONPATH=path)
            until(lambda: len(of_kind(file, "server_joined")) == 2, file)
            until(lambda: len(of_kind(file, "weights_updated")[-1]["outcomes"]) == 2, file)
        joined, updates = of_kind(file, "server_joined"), of_kind(file, "weights_updated")
        assert joined[1]["version"] > 0, "it has got weights before its first request"
        assert [each["version"] for each in updates] == sorted(each["version"] for each in updates)
        assert all(outcome["outcome"] == "committed" for update in updates for outcome in update["outcomes"])
        assert all(update["num_bytes"] for update in updates)
        assert not of_kind(file, "server_left")
        assert not of_kind(file, "canary_disagreed")


def test_two_runs_on_one_node_each_with_a_port_of_its_own(tmp_path: Path) -> None:
    """As the scaling page has it: the second one says another port, which means its own slots."""
    files = list[Path]()
    for name in ("exp1", "exp2"):
        (tmp_path / name).mkdir()
        files.append(write_config(tmp_path / name, "", 'rollout = "1"\n'))
    port = ("--inference.server.port", "8001", "--orchestrator.client.base-url", "http://localhost:8001/v1")
    with running(files[0], "--max-steps", "2") as first, running(files[1], "--max-steps", "2", *port) as second:
        for run, file in zip((first, second), files, strict=True):
            until(lambda run=run: run.poll() is not None, file)
            assert run.returncode == 0, (file.parent / "rl.log").read_text()[-3000:]
            assert rows(file, "metrics.jsonl")[-1]["step"] == 2
            assert not of_kind(file, "server_joined"), "its own slots generate"
