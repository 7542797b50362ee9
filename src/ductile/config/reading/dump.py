"""A resolved config as a TOML file: every key with its value, so that the file alone runs the same thing again.

TOML has no null. A key that is None and would be None without being written is left out, another is written as "None";
a table of free names, or a list, with a null in it is written as JSON text. Secrets are left out, to be given again.
"""

import json
from pathlib import Path as FilePath
from typing import Any, cast

import tomli_w

from ductile.config.reading.command_line import pasteable
from ductile.config.reading.derive import what_follows
from ductile.config.reading.errors import dotted, show
from ductile.config.reading.key_tree import keys
from ductile.config.reading.provenance import Draft
from ductile.config.schema.secrets import SECRETS
from ductile.config.schema.section import Section
from ductile.disk import write_whole

ASKED_ONCE = frozenset({"dry_run", "clean"})


def to_table(section: Section) -> dict[str, Any]:
    """The section as nested plain values that `parse` reads back to an equal section (secrets apart)."""
    table: dict[str, Any] = {}
    for name, key in keys(type(section)).items():
        if name in SECRETS:
            continue
        value = _plain(getattr(section, name))
        if value is not None:
            table[name] = json.dumps(value) if _has_null(value) else value
        elif key.default is not None:
            table[name] = "None"
    return table


def to_toml(table: dict[str, Any]) -> str:
    """The config as TOML, but for what is asked once: to run the file again must not delete what it wrote."""
    return tomli_w.dumps({name: value for name, value in table.items() if name not in ASKED_ONCE})


def write_resolved(config: Section, folder: str | FilePath, command: str, name: str = "config.toml") -> FilePath:
    """Write `folder/name`, whole or not at all. `command` is the one that would run it: "rl".

    What follows from other values stands in comments at the end, left to follow again: so the file may be run on other
    slots, or with another `--seed`. That a run was resumed is left out, too: run again, the file begins one, and
    `--clean` does not contradict it.
    """
    path = FilePath(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Draft(to_table(config))
    following = what_follows(config, draft.values)
    comments = [f"# {dotted(key)} = {show(draft.get(key))}" for key in sorted(following)]
    for key in (("resume",), ("ckpt", "resume_step"), *following):
        draft.drop(key)
    text = f"# Resolved by ductile. Run it again: {pasteable(command, '@', path)}\n\n{to_toml(draft.values)}"
    if comments:
        text += "\n".join(
            ["\n# What follows from the above, and follows again from what is given beside it:", *comments, ""]
        )
    write_whole(path, text)
    return path


def _plain(value: object) -> object:
    """Return the value with a table in the place of each section in it."""
    if isinstance(value, Section):
        return to_table(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in cast(dict[str, object], value).items()}
    if isinstance(value, list):
        return [_plain(item) for item in cast(list[object], value)]
    return value


def _has_null(value: object) -> bool:
    if isinstance(value, dict):
        return any(_has_null(item) for item in cast(dict[str, object], value).values())
    if isinstance(value, list):
        return any(_has_null(item) for item in cast(list[object], value))
    return value is None
