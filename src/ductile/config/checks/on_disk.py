"""Files and folders that a config names: are they there, and are they what they should be? Reads headers, no data."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ductile.config.checks.model_weights import find_weights
from ductile.config.checks.reward_signature import uncallable
from ductile.config.checks.weight_headers import ModelFolderError, stranger
from ductile.config.finding import Finding
from ductile.config.reading.imports import unfit
from ductile.config.schema.orchestrator import ImportTask, JsonlTask, TaskConfig
from ductile.config.schema.run import JsonlData, SFTData
from ductile.core.layout.model.spec import ModelSpec, SpecError, spec_from_hf
from ductile.user_files import NotText, read_text

LOCAL = frozenset({"models", "model", "checkpoints", "runs", "data"})
"""Folders that people have on their disks, and no owner of a model on the hub."""


def read_spec(name: str | None) -> ModelSpec | None:
    """The spec of a model folder; None when there is none to read."""
    spec = None if name is None else _spec(Path(name))
    return spec if isinstance(spec, ModelSpec) else None


def model_findings(
    key: str,
    name: str | None,
    *,
    needs_weights: bool = True,
    num_layers: int | None = None,
    random_init: bool = False,
) -> Iterator[Finding]:
    """What keeps the folder `name`, the value of `key`, from being a model."""
    if name is None:
        return
    folder = Path(name)
    if not folder.is_dir():
        hint = _hub_hint(name)
        what = (
            "is a file, not a model folder" if folder.exists() else f"does not exist (looked for {folder.absolute()})"
        )
        yield Finding((key,), what + hint)
        return
    spec = _spec(folder)
    if isinstance(spec, str):
        yield Finding((key,), spec)
        return
    if not (folder / "tokenizer.json").is_file():
        yield Finding((key,), "is a folder without tokenizer.json")
    if needs_weights and not random_init and not any(folder.glob("*.safetensors")):
        others = [path.name for path in sorted(folder.glob("*.bin"))]
        hint = f"; {others[0]} is not read: save it as safetensors" if others else ""
        yield Finding((key,), f"is a folder without weights (*.safetensors){hint}")
    elif needs_weights and not random_init:
        try:
            wanted = replace(spec, num_layers=min(num_layers or spec.num_layers, spec.num_layers))
            find_weights(folder, wanted, spec.num_layers)
        except ModelFolderError as error:
            yield Finding((key,), f"has weights that cannot be loaded: {error}")
    for file in sorted(folder.iterdir()):
        if file.suffix != ".safetensors" and file.is_file() and (target := stranger(file, folder)):
            what = f"has {file.name}, a link to {target}, which would be copied into the models that are written"
            yield Finding((key,), f"{what}. Put the file itself there, or take the link away")
    if num_layers is not None and num_layers > spec.num_layers:
        at = key.removesuffix("name") + "debug.num_layers"
        yield Finding((at, key), f"must be at most {spec.num_layers}, the layers of the model")


def _hub_hint(name: str) -> str:
    """How to get what `name` looks like; "" where it is no id on the Hugging Face hub."""
    found = re.fullmatch(r"(?:hf://|https?://huggingface\.co/)?((?:[\w.-]+/)?[\w-][\w.-]*)(?:@([\w.-]+))?/?", name)
    if found is None or found[1].startswith("."):
        return ""
    model_id, folder = found[1], Path(found[1])
    if folder.parts[0] in LOCAL:
        model_id = f"OWNER/{folder.name}"
    revision = f" --revision {found[2]}" if found[2] else ""
    then = "" if name == found[1] else f", and write {folder}"
    return f". For a model of the Hugging Face hub: hf download {model_id}{revision} --local-dir {folder}{then}"


def _spec(folder: Path) -> ModelSpec | str:
    """The spec that the folder's config.json describes, or what keeps it from being read."""
    try:
        return spec_from_hf(_config_json(folder))
    except FileNotFoundError:
        return "is a folder without config.json; a Hugging Face model folder has one"
    except OSError as error:
        return f"has a config.json that cannot be read: {error.strerror}"
    except SpecError as error:
        return f"has a config.json that ductile has no model for: {error}"
    except ValueError as error:
        return f"has a config.json that is not valid JSON: {error}"


def _config_json(folder: Path) -> dict[str, Any]:
    try:
        value = cast(object, json.loads(read_text(folder / "config.json")))
    except NotText as error:
        raise ValueError(f"it {error.why}") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("it holds no object")
    return cast(dict[str, Any], value)


def data_findings(data: SFTData) -> Iterator[Finding]:
    if not isinstance(data, JsonlData):
        return
    if data.path is None:
        yield Finding(("data.path",), "is missing: write a JSONL file, or data.type fake")
    else:
        yield from file_findings("data.path", data.path)


def task_findings(task: TaskConfig, at: str) -> Iterator[Finding]:
    if isinstance(task, JsonlTask):
        yield from file_findings(f"{at}.path", task.path)
        rewards = [task.reward] if isinstance(task.reward, str) else task.reward
        for number, path in enumerate(rewards):
            yield from import_findings(f"{at}.reward", path, rewards[:number])
            if why := uncallable(path):
                yield Finding((f"{at}.reward",), f"{path} {why}")
        if not rewards:
            yield Finding((f"{at}.reward",), "is empty: name at least one function")
        if task.reward_weights is not None and len(task.reward_weights) != len(rewards):
            what = f"must have one number for each function of reward, {len(rewards)}"
            yield Finding((f"{at}.reward_weights", f"{at}.reward"), what)
    elif isinstance(task, ImportTask):
        yield from import_findings(f"{at}.import_path", task.import_path)


def num_rows(path: str) -> int | None:
    """Lines of a JSONL file that are not blank; None when there is no such file."""
    try:
        with Path(path).open("rb") as lines:
            return sum(not line.isspace() for line in lines)
    except OSError:
        return None


def file_findings(key: str, name: str) -> Iterator[Finding]:
    path = Path(name)
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else f"does not exist (looked for {path.absolute()})"
        yield Finding((key,), what)
    elif path.stat().st_size == 0:
        yield Finding((key,), "is an empty file")


def import_findings(key: str, import_path: str, before: Sequence[str] = ()) -> Iterator[Finding]:
    """Return what keeps code that the config names from being imported, without running it. before: what is imported
    before it."""
    if what := unfit(import_path, before):
        yield Finding((key,), what)
