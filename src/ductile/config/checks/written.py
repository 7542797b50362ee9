"""What a run writes below its `output_dir`, and what of the user's must not lie there: it would be lost."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from ductile.config.finding import Finding
from ductile.config.schema.run import OrchestratorRunConfig, RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.section import Section

DRY_RUN = "config.dry_run.toml"
"""File that `--dry-run` writes in a folder with a run, whose `config.toml` stays."""
WRITTEN = (
    "config.toml", DRY_RUN, "control.json", "decisions.jsonl", "events.jsonl", "logs", "metrics.jsonl", "model",
    "rollouts.jsonl", "samples.jsonl", "state", "summary.json", "tensorboard", "trace", "wandb", ".model.old",
    ".model.partial",
)  # fmt: skip
"""All that runs write, with what a killed one leaves. Whatever else lies in the folder belongs to the user."""
MARKS = (".lock", "config.toml")
"""Each run makes them first of all: a folder without any is no run's."""
RESOLVED = "# Resolved by ductile."
"""How a `config.toml` begins that a run wrote."""

WritingConfig = RLConfig | SFTConfig | TrainerRunConfig | OrchestratorRunConfig


def output_findings(config: WritingConfig) -> Iterator[Finding]:
    """A run writes over nothing unasked, and deletes nothing but what runs have written.

    `clean` with `resume` is a contradiction of shared keys already. A benchmark writes elsewhere.
    """
    if config.bench is not None and not config.dry_run:
        return
    try:
        yield from [*_folder(config), *_inputs(config)]
    except OSError as error:
        yield Finding(("output_dir",), f"cannot be looked into: {error.strerror} ({error.filename})")
    except ValueError as error:  # half a character, a zero
        yield Finding(("output_dir",), f"is not the name of a folder: {error}")


def _folder(config: WritingConfig) -> Iterator[Finding]:
    folder, resume = Path(config.output_dir), isinstance(config, RLConfig | SFTConfig) and config.resume
    resume_step = config.ckpt.resume_step if isinstance(config, RLConfig | SFTConfig) else None
    goes_on = resume or resume_step is not None
    if config.clean and goes_on and not resume:
        yield Finding(("ckpt.resume_step", "clean"), "contradicts clean: it deletes what is to be resumed")
    elif folder.exists() and not folder.is_dir():
        yield Finding(("output_dir",), "is a file, not a folder")
    elif goes_on:
        return
    elif (theirs := folder / "config.toml").is_file() and not theirs.read_bytes().startswith(RESOLVED.encode()):
        what = f"has a config.toml that no run wrote, and this one would replace it ({theirs}): give it another name"
        yield Finding(("output_dir",), what)
    elif not config.clean and (found := of_a_run(folder)) is not None:
        choices = "--resume goes on with it, --clean replaces it, another --output-dir leaves it alone"
        yield Finding(("output_dir",), f"holds a run already: {choices} (there is {found})")
    elif (found := _of_somebody_else(folder)) is not None:
        does, instead = ("delete", "delete it yourself") if config.clean else ("write to", "move it away")
        what = f"would {does} {found}, but no run has been at work in {folder}: {instead}, or give another output_dir"
        yield Finding(("output_dir", "clean") if config.clean else ("output_dir",), what)


def place_findings(config: Section, source: str) -> Iterator[Finding]:
    """A run's folder was copied or moved, and its `config.toml` still names the first one: which is meant?

    source: the file that says output_dir, as the user named it.
    """
    if not isinstance(config, WritingConfig) or config.bench is not None:
        return
    file, folder = Path(source), Path(config.output_dir)
    try:
        is_a_runs = file.name in ("config.toml", DRY_RUN) and file.read_bytes().startswith(RESOLVED.encode())
        if not is_a_runs or file.parent.resolve() == folder.resolve() or of_a_run(file.parent) is None:
            return
    except OSError:
        return
    what = f"is another folder than {file.parent}, where this file lies beside a run. To mean that one, write"
    yield Finding(("output_dir",), f"{what} --output-dir {file.parent}; for the other, --output-dir {folder}")


def _of_somebody_else(folder: Path) -> Path | None:
    """Something of a name that runs write, in a folder in which none has been."""
    if any((folder / mark).exists() for mark in MARKS):
        return None
    return next((folder / name for name in WRITTEN if os.path.lexists(folder / name)), None)


def has_begun(folder: Path) -> bool:
    """Whether the run in `folder` has told of a step. Of a start that failed before that nothing needs to be kept."""
    try:
        return (folder / "metrics.jsonl").stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False


def of_a_run(folder: Path) -> Path | None:
    """Something that a run has written into `folder`, and that another one would replace or go on with.

    Raises OSError when that cannot be seen: a folder that is not read is not empty.
    """
    if has_begun(folder):
        return folder / "metrics.jsonl"
    for name in ("model", ".run.moving", ".run.old"):  # the latter: a start with `clean` was killed before it began
        if os.path.lexists(folder / name):
            return folder / name
    try:
        states = sorted(path for path in (folder / "state").iterdir() if path.name.startswith("step_"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return states[0] if states else None


def _inputs(config: WritingConfig) -> Iterator[Finding]:
    """Files that the run reads and would lose: below `output_dir` under a name that it writes, links followed."""
    written = {name: Path(config.output_dir) / name for name in WRITTEN}
    seen = set[Path]()
    for key, named in named_files(config):
        for file in (named, *(sorted(named.iterdir()) if named.is_dir() else ())):  # a model may be a folder of links
            place = next((path for path in written.values() if _is_in(file, path)), None)
            if place is not None and named not in seen:
                seen.add(named)
                does = "deletes" if config.clean else "writes"
                inside = "" if file == place else f", and {file} lies there"
                what = f"would be lost: this run {does} {place}{inside}. Copy it elsewhere, or give another output_dir"
                yield Finding((key, "output_dir"), what)


def _is_in(file: Path, place: Path) -> bool:
    """The paths as they are named, and as their links resolve: what is deleted may be the link or what it leads to."""
    for see in (os.path.abspath, os.path.realpath):
        inner, outer = Path(see(file)), Path(see(place))
        if inner == outer or outer in inner.parents:
            return True
    return False


def named_files(section: Section, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    """Every file or folder that the config names for reading, with its key."""
    for name in type(section).model_fields:
        value, key = cast(object, getattr(section, name)), (*path, name)
        if isinstance(value, Section):
            yield from named_files(value, key)
            continue
        for text in cast(list[object], value) if isinstance(value, list) else [value]:
            if isinstance(text, str):
                yield from _files(key, text)


def _files(key: tuple[str, ...], value: str) -> Iterator[tuple[str, Path]]:
    name = key[-1]
    if name in ("path", "chat_template") or key[-2:] == ("model", "name"):
        yield ".".join(key), Path(value)
    elif name in ("import_path", "reward", "policy") and ("." in value or ":" in value):
        file, _, _ = value.rpartition(":")
        package = re.split(r"[.:]", value)[0]
        for source in [Path(file)] if file.endswith(".py") else [Path(package), Path(package + ".py")]:
            if source.exists():
                yield ".".join(key), source
