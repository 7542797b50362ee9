"""The output printed in docs/simulator.md is what the command prints, on every machine."""

import re
from pathlib import Path

import pytest

from ductile.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_the_printed_output_of_the_example_is_what_the_command_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    shown = re.search(r"```\n\$ ductile (simulate @ \S+)\n(.*?)\.\.\.\n```", page, re.DOTALL)
    assert main([*shown[1].split(), "--output-dir", str(tmp_path)]) == 0
    printed = iter(capsys.readouterr().out.splitlines())
    for line in shown[2].splitlines():
        assert next(printed).startswith(line.removesuffix("..."))
