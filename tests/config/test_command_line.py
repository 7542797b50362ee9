"""Commands that ask about a run: how its folder is written, and how they say no."""

import pytest

from ductile.cli import TOOLS, main
from ductile.config.reading.command_line import as_sentence

ASKS = {"plan": [], "status": [], "report": [], "resize": ["--train", "0"]}


@pytest.mark.parametrize("name", ASKS)
@pytest.mark.parametrize("folder", [["runs/nowhere"], ["--run", "runs/nowhere"]])
def test_the_folder_may_be_named_or_not(name, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([name, *folder, *ASKS[name]]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ductile {name}: there is no run")
    assert "runs/nowhere" in said


@pytest.mark.parametrize("name", ASKS)
@pytest.mark.parametrize("folder", [[], ["runs/x", "--run", "runs/y"]])
def test_the_folder_is_written_once(name, folder, capsys):
    with pytest.raises(SystemExit):
        main([name, *folder, *ASKS[name]])
    assert f"write the run's folder, once: ductile {name} runs/x" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plan", "report"])
def test_a_path_stays_as_it_is_written(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert main([name, "mine"]) == 2
    assert capsys.readouterr().err.startswith(f"ductile {name}: mine holds no run that has begun")


@pytest.mark.parametrize(
    ("text", "sentence"), [("no run", "no run."), ("no run.", "no run."), ("lack its `return`?", "lack its `return`?")]
)
def test_a_sentence_ends_once(text, sentence):
    assert as_sentence(text) == sentence


@pytest.mark.parametrize("name", ["rl", "check", *TOOLS])
def test_every_command_knows_its_version(name, capsys):
    assert main([name, "--version"]) == 0
    assert capsys.readouterr().out.startswith("ductile ")
