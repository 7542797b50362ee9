"""A file that happens to lie where the user types a command is never imported in a library's place, by no process."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from ductile.cluster.processes import ProcessServer
from ductile.config.schema.inference import InferenceConfig
from ductile.config.schema.run import InferenceRunConfig
from ductile.orchestrator.commands import run
from ductile.records import Completion
from ductile.tasks.grader import Graders
from ductile.transport.sockets import LOOPBACK

LIBRARIES = ("torch", "msgspec", "pydantic", "numpy", "zmq", "json", "tokenizers", "safetensors", "fastapi")


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; whatever is imported from it leaves a note there."""
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\nraise ImportError('the wrong {name}')\n"
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path / "imported"


@pytest.mark.usefixtures("cold")
def test_graders_and_what_they_import_for_a_task(trap: Path):
    (trap.parent / "mine.py").write_text("import beside\n\ndef reward(example, completion):\n    return beside.WORTH\n")
    (trap.parent / "beside.py").write_text("WORTH = 0.25\n")
    (trap.parent / "rows.jsonl").write_text('{"prompt": "1 + 1 ="}\n')

    async def story():
        task = {"type": "jsonl", "path": "rows.jsonl", "reward": "mine.py:reward"}
        async with Graders({"train": task}) as graders:
            return await graders.reward("train", 0, Completion("2"))

    verdict = asyncio.run(asyncio.wait_for(story(), 60))
    assert verdict.reward == 0.25, verdict.error
    assert not trap.exists()


@pytest.mark.usefixtures("cold")
def test_the_process_server_and_what_it_forks(trap: Path):
    async def story():
        server = ProcessServer(trap.parent / "log", {}, lambda process: None)
        try:
            await server.start(["ductile.slot.worker", "ductile.slot.store"], 60)
            process = await server.fork("store", "ductile.slot.store:host", {"host": LOOPBACK}, trap.parent / "log")
            await asyncio.wait_for(process.heard.wait(), 60)
            return process.said
        finally:
            await server.stop(10)

    (port,) = asyncio.run(asyncio.wait_for(story(), 120))
    assert int(port) > 0, (trap.parent / "log").read_text()
    assert not trap.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("cold")
def test_the_server_that_inference_becomes(trap: Path, monkeypatch: pytest.MonkeyPatch):
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: became.append(words))
    config = InferenceRunConfig.model_validate(InferenceConfig().model_dump() | {"model": {"name": "nowhere"}})
    run.run_inference(config)
    *words, _ = became[0]
    (trap.parent / "config.json").write_text(config.model_dump_json())
    server = subprocess.run([*words, "config.json"], capture_output=True, text=True, timeout=120)
    assert "nowhere" in server.stderr  # it has come as far as to look for its model
    assert not trap.exists()
