"""What of a model's `generation_config.json` counts for a server, and what users are told of the rest."""

import json
from pathlib import Path
from typing import Any

import pytest

from ductile.config.checks.generation import generation_config_notes
from ductile.config.checks.generation_config import generation_defaults
from ductile.config.schema.inference import InferenceConfig, ServerConfig
from ductile.config.schema.orchestrator import SamplingConfig


def folder_with(folder: Path, table: Any) -> Path:
    (folder / "generation_config.json").write_text(table if isinstance(table, str) else json.dumps(table))
    return folder


QWEN = {
    "bos_token_id": 1, "pad_token_id": 1, "do_sample": True, "eos_token_id": [2, 1], "repetition_penalty": 1.05,
    "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("table", "used", "unused"),
    [
        ({}, {}, {}),
        (QWEN, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}, {"repetition_penalty": 1.05}),
        ({"temperature": 1.0, "top_k": 0, "min_p": None, "num_beams": 1, "repetition_penalty": 1.0}, {}, {}),
        ({"temperature": 0, "max_new_tokens": 9, "use_cache": False}, {"temperature": 0, "max_new_tokens": 9}, {}),
        (
            {"num_beams": 4, "bad_words_ids": [[7]], "_from_model_config": True},
            {},
            {"num_beams": 4, "bad_words_ids": [[7]]},
        ),
    ],
)
def test_what_counts(table: dict[str, Any], used: dict[str, Any], unused: dict[str, Any], tmp_path: Path) -> None:
    found = generation_defaults(folder_with(tmp_path, table))
    assert (found.used, found.unused) == (used, unused)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("{", "generation_config.json cannot be read"),
        ("[]", "must hold a JSON object, not list"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number of at least 0"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be a whole number"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be a number above 0 and at most 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be a whole number of at least 1"),
        ({"min_p": True}, "min_p is True; it must be a number from 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused(table: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=told):
        generation_defaults(folder_with(tmp_path, table))


def test_users_are_told(tmp_path: Path) -> None:
    folder = str(folder_with(tmp_path, QWEN))
    assert generation_config_notes(InferenceConfig(), folder) == [
        "requests that do not say otherwise are sampled with temperature 0.7, top_p 0.8, top_k 20, of "
        "generation_config.json",
        "not used of generation_config.json: repetition_penalty 1.05",
    ]
    assert generation_config_notes(InferenceConfig(server=ServerConfig(generation_config="ignore")), folder) == []
    (told,) = generation_config_notes(SamplingConfig(temperature=0.7, top_p=0.8), folder)
    assert told.startswith(f"generation_config.json of {folder} says top_k 20, repetition_penalty 1.05; rollouts are ")
    assert generation_config_notes(SamplingConfig(), str(tmp_path / "none")) == []
