"""A server that is started to be asked by `--bench`."""

import sys

from ductile.config.schema.run import InferenceRunConfig
from ductile.orchestrator.commands.run import run_inference


def test_a_server_that_cannot_start_says_why_itself(tmp_path, capfd):
    settings = {"model": {"name": str(tmp_path / "nowhere")}, "cluster": {"device": "cpu"}, "bench": {}}
    assert run_inference(InferenceRunConfig.model_validate(settings)) == 1
    said = capfd.readouterr().err
    assert said.startswith("ductile inference: ")
    assert "nowhere" in said
    assert len(said.splitlines()) == 1


def test_a_server_that_was_killed_cannot_say_so_itself(tmp_path, capfd, monkeypatch):
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr("ductile.orchestrator.commands.serving.server_command", lambda fd: killed)
    settings = {"model": {"name": str(tmp_path)}, "cluster": {"device": "cpu"}, "bench": {}}
    assert run_inference(InferenceRunConfig.model_validate(settings)) == 1
    assert capfd.readouterr().err == "ductile inference: the server was killed by SIGKILL\n"
