"""What goes wrong on the way to a model folder is told, and the trainer is as it was."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ductile.trainer.export import FolderNotWritten, export_model

BASE = SimpleNamespace(num_layers=1, tie_embeddings=True)
SPEC = SimpleNamespace(base=BASE, lora=None)


def trainer_of(source: Path) -> Any:
    """A trainer on one slot, as far as an export looks at it before anything is written."""
    context = SimpleNamespace(layout=SimpleNamespace(slots=(0,)), slot=0, is_first=True, sum=lambda tensor: tensor)
    config = SimpleNamespace(model=SimpleNamespace(name=str(source)))
    precision = SimpleNamespace(parameters=torch.float32)
    return SimpleNamespace(
        config=config, context=context, precision=precision, spec=SPEC, device="cpu", export_weights=lambda _: iter(())
    )


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "config.json"),
        (
            {"config.json": json.dumps({"dtype": "float32", "num_hidden_layers": 1}), "generation_config.json": "{"},
            "generation_config.json is not JSON",
        ),
    ],
    ids=["no config", "a broken generation config"],
)
def test_a_source_that_was_damaged_meanwhile_is_told(tmp_path: Path, files: dict[str, str], told: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(FolderNotWritten, match=told):
        export_model(trainer_of(tmp_path), str(tmp_path / "out"), "auto")
    assert not (tmp_path / "out").exists()
