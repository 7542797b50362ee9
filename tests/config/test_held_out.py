"""`ductile check` tells what is asked, how it is scored, and what is kept for the evaluation."""

from pathlib import Path

import pytest

from ductile.cli import main
from ductile.config.checks.preflight import warnings
from ductile.config.schema.run import RLConfig
from tests.config.stories import furnish


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (
            ("--orchestrator.eval.num-examples", "20"),
            [
                "task      letters.jsonl, 50 examples",
                "reward    mine.py:exact + 0.5 x mine.py:brief",
                "held out: the task's last 20 (orchestrator.eval.num_examples); 30 examples",
            ],
        ),
        (
            ("--no-orchestrator.eval.enabled",),
            ["eval      none, and nothing is held out: orchestrator.eval.enabled is false"],
        ),
        (("--bench",), ["eval      none, and nothing is held out: --bench"]),
    ],
)
def test_check_tells_of_the_task(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    lines: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    (tmp_path / "letters.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(50)))
    (tmp_path / "mine.py").write_text(
        "def exact(row, completion): ...\n\n\ndef brief(row, completion, num_tokens): ...\n"
    )
    (tmp_path / "run.toml").write_text(
        'max_steps = 1\n[model]\nname = "model"\n[orchestrator.task]\ntype = "jsonl"\npath = "letters.jsonl"\n'
        'reward = ["mine.py:exact", "mine.py:brief"]\nreward_weights = [1, 0.5]\n'
    )
    assert main(["check", "@", "run.toml", *flags]) == 0
    said = capsys.readouterr().out
    for line in lines:
        assert line in said


@pytest.mark.parametrize(("evaluated", "noted"), [({}, True), ({"system_prompt": "Be brief."}, False)])
def test_an_evaluation_that_lacks_the_system_prompt_of_training_is_noted(
    evaluated: dict[str, str], noted: bool
) -> None:
    task = {"type": "jsonl", "path": "x.jsonl", "reward": "mine.py:exact"}
    orchestrator = {"task": task | {"system_prompt": "Add."}, "eval": {"task": task | evaluated}}
    said = warnings(RLConfig.model_validate({"orchestrator": orchestrator}))
    assert any("evaluation asks without a system prompt" in note for note in said) == noted


def test_check_tells_of_held_out_rows_that_are_trained_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    prompts = ["a", "b  c", "caf\u00e9", *(str(n) for n in range(5)), "b c\\n", "cafe\u0301", "z"]
    rows = "".join(f'{{"prompt": "{prompt}", "solution": "{n}"}}\n' for n, prompt in enumerate(prompts))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "mine.py").write_text("def exact(row, completion): ...\n")
    task = ["--orchestrator.task.type", "jsonl", "--orchestrator.task.path", "rows.jsonl"]
    task += ["--orchestrator.task.reward", "mine.py:exact", "--model.name", "model", "--max-steps", "1"]
    assert main(["check", *task, "--orchestrator.eval.num-examples", "3"]) == 0
    said = capsys.readouterr().out
    assert "2 of the 3 held-out prompts are trained on, too: rows.jsonl:9 is rows.jsonl:2, rows.jsonl:10 is " in said
    own = ["--orchestrator.eval.task.type", "jsonl", "--orchestrator.eval.task.path", "own.jsonl"]
    (tmp_path / "own.jsonl").write_text('{"prompt": "new"}\n{"prompt": "z"}\n')
    assert main(["check", *task, *own, "--orchestrator.eval.task.reward", "mine.py:exact"]) == 0
    assert "1 of the 2 held-out prompts is trained on, too: own.jsonl:2 is rows.jsonl:11." in capsys.readouterr().out
