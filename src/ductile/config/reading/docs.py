"""The generated parts of `docs/config.md`. `python -m ductile.config.reading.docs docs/config.md` brings the file up to
date; a test fails when it is not."""

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path as FilePath

from ductile.config.reading.errors import dotted
from ductile.config.reading.help import KeyHelp, lines
from ductile.config.reading.key_tree import REQUIRED, walk
from ductile.config.reading.rename import renames
from ductile.config.reading.share import SHARED, Shared
from ductile.config.reading.unread import UNREAD
from ductile.config.schema.run import (
    InferenceRunConfig,
    OrchestratorRunConfig,
    RLConfig,
    RouterRunConfig,
    SFTConfig,
    TrainerRunConfig,
)
from ductile.config.schema.section import NotBuilt, Section

ROOTS: tuple[tuple[str, type[Section], str], ...] = (
    ("rl", RLConfig, ""),
    ("sft", SFTConfig, ""),
    ("trainer", TrainerRunConfig, "trainer"),
    ("orchestrator", OrchestratorRunConfig, "orchestrator"),
    ("inference", InferenceRunConfig, "inference"),
    ("router", RouterRunConfig, ""),
)
"""Command, tree, and the branch of `rl` that is most of it."""

_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill_in(text: str) -> str:
    """The page with its generated parts as they should be now."""
    parts = {
        "shared": shared_table(),
        "unread": unread_table(),
        "renames": rename_table(),
        "keys": key_tables(),
        "unbuilt": unbuilt_table(),
    }
    return _PART.sub(lambda part: f"{part[1]}{parts[part[2]]}\n{part[3]}", text)


def shared_table() -> str:
    rows = [
        (f"`{name}`", f"`{shared.key}`", _codes(shared.targets), _both(shared))
        for name, root, _ in ROOTS
        for shared in SHARED.get(root, ())
    ]
    return _table(("command", "key", "goes to, where absent", "given both"), rows)


def _both(shared: Shared) -> str:
    if shared.must_agree:
        return f"must not differ: {shared.why}" if shared.why else "must not differ"
    return f"may differ: {shared.why}"


def rename_table() -> str:
    commands: dict[tuple[str, str], list[str]] = {}
    for name, root, _ in ROOTS:
        for old, new in renames(root).items():
            commands.setdefault((dotted(old), dotted(new)), []).append(name)
    rows = [
        (f"`{old}`", f"`{new}`", "all" if len(names) == len(ROOTS) else _codes(names))
        for (old, new), names in commands.items()
    ]
    return _table(("written", "read as", "by"), rows)


def unread_table() -> str:
    rows = [
        (f"`{name}`", _codes(unread.keys), "noted" if unread.noted else "refused", unread.why)
        for name, root, _ in ROOTS
        for unread in UNREAD.get(root, ())
    ]
    return _table(("command", "keys", "when set", "why"), rows)


def key_tables() -> str:
    """One table a command. What stands in a branch of `rl` is not said twice."""
    known = set(lines(RLConfig))
    out: list[str] = []
    for name, root, branch in ROOTS:
        out += [f"### `ductile {name}`\n"]
        if branch:
            out += [f"Everything below `{branch}` of `ductile rl`, without the `{branch}.` before it, and:\n"]
        own = [line for line in lines(root) if not branch or replace(line, path=(branch, *line.path)) not in known]
        out += [_table(("key", "value", "default", ""), map(_row, own)), ""]
    return "\n".join(out)


def unbuilt_table() -> str:
    """What is refused, by feature: keys, or some values of a key. `sft` and the others repeat what `rl` has."""
    features: dict[NotBuilt, list[str]] = {}
    seen: set[tuple[object, ...]] = set()
    for name, root, branch in ROOTS:
        for path, key in walk(root):
            if key.not_built is None:
                continue
            values = key.not_built.only or (key.choices if key.default is REQUIRED else ())
            where = _home(path, branch)
            if (where, values) not in seen:
                seen.add((where, values))
                text = f"`{dotted(where)}`" + (f" = {_codes(map(str, values))}" if values else "")
                features.setdefault(key.not_built, []).append(text if where in _PATHS else f"{text} ({name})")
    rows = [(feature.what, ", ".join(texts), feature.instead) for feature, texts in features.items()]
    return _table(("not built yet", "keys", "instead"), rows)


_PATHS = {path for path, _ in walk(RLConfig)}


def _home(path: tuple[str, ...], branch: str) -> tuple[str, ...]:
    """Path of the key in `rl`: as it is, in the command's branch, or, for the trainer's keys of `sft`, in `trainer`."""
    return next((home for home in ((branch, *path), ("trainer", *path), path) if home in _PATHS), path)


def _row(line: KeyHelp) -> tuple[str, str, str, str]:
    variant = f" ({line.variant})" if line.variant else ""
    said = " ".join(part for part in (line.help, f"*{line.not_built}*" if line.not_built else "") if part)
    return f"`{dotted(line.path)}`{variant}", line.wants, f"`{line.default}`", said


def _codes(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    all_rows = [head, tuple("---" for _ in head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in all_rows)


if __name__ == "__main__":
    page = FilePath(sys.argv[1])
    page.write_text(fill_in(page.read_text()))
