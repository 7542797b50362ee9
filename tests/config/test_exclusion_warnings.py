"""Keys of memory that do nothing beside others: each is told in a line."""

from pathlib import Path

import pytest

from ductile.config.checks.exclusions import exclusion_warnings
from ductile.config.reading.parse import parse
from ductile.config.schema.run import RLConfig
from tests.config.stories import furnish


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("optim-cpu-offload", []),
        ("optim-cpu-offload --trainer.optim.type sign_sgd", ["optim_cpu_offload"]),
        ("optim-cpu-offload --trainer.optim.type sgd", []),
        ("optim-cpu-offload --trainer.optim.type sgd --trainer.optim.momentum 0", ["optim_cpu_offload"]),
        ("ac.mode full", []),
        ("ac.mode full --trainer.model.ac.targets mlp", ["ac.targets"]),
        ("ac.mode selective --trainer.model.ac.targets mlp", []),
        ("ac.freq 2", []),
        ("ac.freq 99", ["ac.freq = 99"]),  # of 2 layers
    ],
)
def test_keys_without_effect_are_told(
    words: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    config = parse(RLConfig, ["@", "good.toml", *f"--trainer.model.{words}".split()], across=False).config
    found = list(exclusion_warnings(config))
    assert len(found) == len(said), found
    assert all(sentence.startswith(f"trainer.model.{key}") for sentence, key in zip(found, said, strict=True))
