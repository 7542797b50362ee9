"""Every key that names a file or a folder reads it in one way, and every printed command can be pasted."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from ductile.cli import main
from ductile.config.reading.command_line import as_sentence, parse_with_folder, pasteable
from ductile.config.reading.docs import ROOTS
from ductile.config.reading.errors import ConfigError, flag
from ductile.config.reading.key_tree import value_at, walk
from ductile.config.reading.parse import parse
from ductile.config.schema.run import RLConfig
from ductile.config.schema.section import Section
from tests.config.stories import furnish


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a model and data, beside the current folder, which has nothing."""
    folder = tmp_path / "home"
    folder.mkdir()
    furnish(folder)
    (folder / "reward.py").write_text("def right(row, completion): ...\n")
    (folder / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(folder))
    return folder


def test_a_config_that_lies_at_home_may_say_so_everywhere(home: Path) -> None:
    Path("run.json").write_text(
        json.dumps(
            {
                "output_dir": "~/run",
                "model": {"name": "~/model"},
                "inference": {"model": {"chat_template": "~/chat.jinja"}},
                "tensorboard": {"dir": "~/board"},
                "orchestrator": {
                    "task": {"type": "jsonl", "path": "~/data.jsonl", "reward": ["~/reward.py:right"] * 2},
                    "eval": {"enabled": False},
                },
            }
        )
    )
    (home / "more.toml").write_text("max_steps = 3\n")
    config = parse(RLConfig, ["@", "run.json", "@~/more.toml"]).config
    for key, wanted in {
        "output_dir": "run",
        "trainer.model.name": "model",
        "inference.model.chat_template": "chat.jinja",
        "tensorboard.dir": "board",
        "orchestrator.task.path": "data.jsonl",
    }.items():
        assert value_at(config, tuple(key.split("."))) == str(home / wanted)
    assert value_at(config, ("orchestrator", "task", "reward")) == [f"{home}/reward.py:right"] * 2
    assert config.max_steps == 3


@pytest.mark.parametrize(("command", "root"), [(command, root) for command, root, _ in ROOTS])
def test_every_key_that_names_a_file_is_one(command: str, root: type[Section]) -> None:
    """So a key that is added is a path by its type, and not a text."""
    words = ("path", "dir", "folder", "file", "template", "import_path", "reward", "output_json", "arms")
    texts = {
        ".".join(path)
        for path, key in walk(root)
        if key.is_text and not key.on_disk and not (key.not_built and not key.not_built.only)
        if path[-1].split("_")[-1] in words or path[-1] in words or path[-2:] == ("model", "name")
    }
    assert {text for text in texts if not text.startswith(("slurm", "deployment")) and "question" not in text} == set()


@pytest.mark.parametrize("key", ["output_dir", "model.name", "tensorboard.dir", "cluster.policy", "bench.output_json"])
def test_a_variable_is_refused(home: Path, key: str) -> None:
    (home / "good.toml").write_text((home / "good.toml").read_text().replace('"model"', '"~/model"'))
    with pytest.raises(ConfigError) as caught:
        parse(RLConfig, ["@", "~/good.toml", flag(tuple(key.split("."))), "$SCRATCH/x"])
    (problem,) = caught.value.problems
    assert problem.key == flag(tuple(key.split(".")))
    assert problem.what.startswith("has $SCRATCH in it, which only a shell replaces")


def test_folders_of_runs_are_paths_too(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    assert parse_with_folder(argparse.ArgumentParser(), ["~/x"]).run == home / "x"
    assert parse_with_folder(argparse.ArgumentParser(), ["--run", "~/x"]).run == home / "x"
    with pytest.raises(SystemExit):
        main(["status", "$SCRATCH/x"])
    assert "has $SCRATCH in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B"),
        ("hf://Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B, and write Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B@main", "--revision main --local-dir Qwen/Qwen3-0.6B, and write Qwen/Qwen3-0.6B"),
        ("gpt2", "hf download gpt2 --local-dir gpt2"),
        ("models/mine", "hf download OWNER/mine --local-dir models/mine"),
    ],
)
def test_a_name_on_the_hub_is_told_how_to_become_a_folder(home: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(RLConfig, ["@", "~/good.toml", "--model.name", name])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "word", ["runs/x", "my runs/x", "it's", "$HOME", "a\nb", "caf\u00e9", "x\udce9", "", "\x1b[1m", "!"]
)
def test_a_printed_command_is_pasted_as_it_was_meant(word: str) -> None:
    said = pasteable("status", word)
    assert "\n" not in said
    script = ["bash", "-c", said.replace("ductile", "printf %s", 1).replace("status ", "", 1)]
    assert subprocess.run(script, capture_output=True, check=True).stdout == word.encode("utf-8", "surrogateescape")


def test_nothing_is_written_behind_a_command() -> None:
    assert as_sentence(f"What it did: {pasteable('report', 'my run')}").endswith("ductile report 'my run'")
    assert as_sentence("No ductile runs here") == "No ductile runs here."


def test_a_resolved_config_says_how_to_run_it(home: Path) -> None:
    assert main(["rl", "@", "~/good.toml", "--model.name", "~/model", "--output-dir", "my run", "--dry-run"]) == 0
    first = Path("my run/config.toml").read_text().splitlines()[0]
    words = shlex.split(first.partition("again: ")[2])
    assert words == ["ductile", "rl", "@", "my run/config.toml"]
    assert parse(RLConfig, words[2:]).config.output_dir == "my run"


SHA = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "layout", ["links into a cache", "blobs elsewhere", "each blob elsewhere", "a cache's own names"]
)
def test_a_model_may_be_made_of_links_into_a_cache(home: Path, layout: str) -> None:
    cache, store, snapshot = home / "models--a--b", home / "store", home / "models--a--b/snapshots/abc"
    snapshot.mkdir(parents=True)
    if layout == "blobs elsewhere":
        store.mkdir()
        (cache / "blobs").symlink_to(store)
    else:
        (cache / "blobs").mkdir()
    model = home / "links" if layout == "links into a cache" else snapshot
    model.mkdir(exist_ok=True)
    for number, file in enumerate(sorted((home / "model").iterdir())):
        is_named = layout in ("blobs elsewhere", "a cache's own names")  # by whoever made the cache, and not by digests
        blob = cache / "blobs" / (str(number) if is_named else SHA[number:] + SHA[:number])
        if layout == "each blob elsewhere":
            store.mkdir(exist_ok=True)
            blob.symlink_to(file.rename(store / f"part-{number}"))
        else:
            file.rename(blob)
        (model / file.name).symlink_to(blob if model != snapshot else f"../../blobs/{blob.name}")
    assert parse(RLConfig, ["@", "~/good.toml", "--model.name", str(model)]).config.model.name == str(model)


@pytest.mark.parametrize("target", ["secret", f"elsewhere/{SHA}", "blobs/secret"])
def test_a_link_to_something_else_is_refused(home: Path, target: str) -> None:
    (home / target).parent.mkdir(exist_ok=True)
    (home / target).write_text("my password")
    (home / "model/LICENSE").symlink_to(home / target)
    with pytest.raises(ConfigError, match=r"has LICENSE, a link to .*, which would be copied"):
        parse(RLConfig, ["@", "~/good.toml", "--model.name", "~/model"])
