"""The commands that README prints can be typed as they stand."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from ductile.config.reading.parse import parse
from ductile.config.schema.run import RLConfig

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines() if "ductile " in line]
YOURS = {"my.toml", "orch.toml", "http://10.0.0.9:8000"}
"""README says that these are the reader's own."""
MADE = "runs/quickstart/"
"""The quickstart leaves it."""


def test_the_import_order_of_the_docs_is_the_one_that_is_enforced():
    (contract, *_) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    text = " ".join((ROOT / "docs" / "design.md").read_text(encoding="utf-8").split())
    assert " > ".join(f"`{layer}`" for layer in contract["layers"]) in text


def test_the_bands_of_the_docs_name_all_packages_in_the_order_of_their_imports():
    (contract, *_) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in reversed(contract["layers"])]
    height = {package: at for at, packages in enumerate(layers) for package in packages}
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    table = text[text.index("| band |") :].split("\n\n")[0].splitlines()[2:]
    bands = [re.findall(r"`(\w+)`", line.split("|")[2]) for line in table]
    for packages in bands:
        assert packages == sorted(packages, key=lambda package: height[package])
    assert {package for packages in bands for package in packages} == height.keys()


def test_ductile_is_on_the_path_before_it_is_called():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("\nsource .venv/bin/activate ") < text.index("```\nductile check")
    assert text.index("\nsource .venv/bin/activate ") < text.index("\nductile report ")


@pytest.mark.parametrize("command", [words for words in COMMANDS if words and words[0] == "ductile"], ids=" ".join)
def test_files_are_there_or_the_reader_s_own(command):
    files = [word for word in command if "/" in word or word.endswith(".toml")]
    for file in files:
        assert file in YOURS or file.startswith((MADE, "runs/")) or (ROOT / file).exists(), file


@pytest.mark.parametrize("num_steps", [1, 3, 400])
def test_the_quickstart_may_be_made_shorter_or_longer(num_steps, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    words = ["@", "examples/quickstart/rl.toml", "--max-steps", str(num_steps), "--output-dir", str(tmp_path)]
    assert parse(RLConfig, words).config.max_steps == num_steps
