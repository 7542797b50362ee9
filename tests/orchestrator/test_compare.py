"""`ductile compare`: generator and scorer over the whole vocabulary."""

import json
import shutil

import pytest

from ductile.config.reading.parse import parse
from ductile.config.schema.run import RLConfig
from ductile.generator.compare import compare
from ductile.messages.comparison import Compare
from ductile.model.checkpoint import load_model
from ductile.orchestrator.commands.compare import main
from tests.tiny import make_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("m") / "model")


@pytest.fixture
def words(tmp_path, folder):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 2 ="}\n{"text": "Once upon a time"}\n')
    (tmp_path / "run.toml").write_text(
        f'output_dir = "{tmp_path}/run"\nseq_len = 128\n[model]\nname = "{folder}"\n[cluster]\ndevice = "cpu"\n'
        '[cluster.component_placement]\n"actor,rollout" = 0\n[orchestrator]\nbatch_size = 8\n'
        '[orchestrator.task]\ntype = "builtin"\nname = "addition"\n'
    )
    return ["@", str(tmp_path / "run.toml"), "--prompts", str(tmp_path / "prompts.jsonl")]


def test_both_say_the_same_of_one_model_and_the_worst_tokens_are_shown(words, tmp_path, capfd):
    assert main([*words, "--json", str(tmp_path / "found.json"), "--worst", "3"]) == 0
    head, *rows, summary, verdict = capfd.readouterr().out.splitlines()
    assert head.split() == ["prompt", "position", "generator", "scorer", "difference", "token"]
    assert len(rows) == 3
    assert "16 decoded: differences are" in summary
    assert "0.000% of them over 1e-3" in summary
    assert verdict == "They agree: float32 explains 0.002."
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["agree"]
    assert found["largest"] < 1e-4
    assert found["worst"][0]["text"]
    assert found["num_positions"] > 20


def test_what_generator_and_scorer_do_not_agree_about_is_found(words, tmp_path, monkeypatch):
    other = make_model_folder(tmp_path / "other", seed=1)
    monkeypatch.setattr("ductile.generator.compare.load_model", lambda folder, **given: load_model(other, **given))
    config = parse(RLConfig, words[:2]).config
    found = compare(Compare(config.model_dump(mode="json"), ((5, 6, 7, 8), (9, 10)), 2, 4))
    assert found.num_positions == 6
    assert found.num_decoded == 4
    assert found.largest == found.worst[0].difference > 1
    assert found.share_over > 0.9


def test_a_model_that_a_run_has_written_is_compared_in_its_place(words, folder, tmp_path, capfd):
    shutil.copytree(folder, tmp_path / "run" / "model")
    words = [*words[:2], "--model.name", str(tmp_path / "run" / "model"), "--prompts", str(tmp_path / "missing.jsonl")]
    assert main(words) == 2
    assert "missing.jsonl" in (said := capfd.readouterr().err), "it comes to the prompts"
    assert "would be lost" not in said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--inference.model.max_model_len", "20", "--trainer.model.seq_len", "20"], "it must have 1 to 12"),
        (["--trainer.optim.lr", "fast"], "trainer.optim.lr"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(words, changed, said, capsys):
    assert main([*words, *changed]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ductile compare: ")
    assert said in error
