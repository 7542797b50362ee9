"""A server that is started to be asked by `--bench`."""

from ductile.config.schema.run import InferenceRunConfig
from ductile.orchestrator.commands.run import run_inference


def test_a_server_that_cannot_start_says_why_itself(tmp_path, capfd):
    settings = {"model": {"name": str(tmp_path / "nowhere")}, "cluster": {"device": "cpu"}, "bench": {}}
    assert run_inference(InferenceRunConfig.model_validate(settings)) == 1
    said = capfd.readouterr().err
    assert said.startswith("ductile inference: ")
    assert "nowhere" in said
    assert len(said.splitlines()) == 1
