"""The command line: `@ file` merges a file, `--a.b @ file` merges it below `a.b`, `--a.b value` sets a key.

Grammar (one rule a line):

    @ run.toml  @run.toml            a file for the whole tree; several merge left to right
    --trainer.model @ model.toml     a file for one table; laid over the files for the whole tree
    --key value  --key=value         kebab-case or snake_case; the last one wins
    --flag  --no-flag                true, false; `--no-table` and `--table None` turn an optional table off
    --table                          turns an optional table on, with its defaults
    --list a b c  --list '["a"]'     a list, up to the next flag, or as JSON; `--list.0 x` sets one item
    --table '{"a": 1}'               JSON, merged like a file's table; of free names (a placement) it is the whole table
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from ductile.config.reading.errors import ConfigError, Problem, flag, show
from ductile.config.reading.files import read_file
from ductile.config.reading.key_tree import REQUIRED, Key, find, keys
from ductile.config.reading.provenance import COMMAND_LINE, Draft, Path, as_list
from ductile.config.reading.rename import rename, rename_path
from ductile.config.reading.unknown import unknown_key
from ductile.config.schema.section import Section

_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(slots=True)
class Given:
    """Everything that the user gave, merged: files, then nested files, then flags."""

    draft: Draft = field(default_factory=Draft)
    notices: list[str] = field(default_factory=list[str])
    problems: list[Problem] = field(default_factory=list[Problem])
    files: list[str] = field(default_factory=list[str])
    all_read: bool = True
    """Whether every file could be read. If not, a missing key may be in a file that could not be."""


@dataclass(frozen=True, slots=True)
class _Assignment:
    path: Path
    words: tuple[str, ...] | None
    """Words of the flag's value; None when the flag stood alone."""
    typed: str
    negated: bool = False


@dataclass(slots=True)
class _Words:
    """The words of a command line, sorted."""

    files: list[str] = field(default_factory=list[str])
    nested: list[tuple[Path, str]] = field(default_factory=list[tuple[Path, str]])
    assignments: list[_Assignment] = field(default_factory=list[_Assignment])
    problems: list[Problem] = field(default_factory=list[Problem])


def read(root: type[Section], argv: Sequence[str]) -> Given:
    """What the words after `ductile rl` say. Reads the files that they name."""
    words = _sort(root, list(argv))
    given = Given(problems=words.problems)
    for name in words.files:
        _merge_file(root, given, (), name)
    for path, name in words.nested:
        _merge_file(root, given, path, name)
    for assignment in words.assignments:
        _assign(root, given, assignment)
    return given


def _sort(root: type[Section], argv: list[str]) -> _Words:
    words = _Words()
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        typed, equals, attached = word.partition("=")
        if word.startswith("@"):
            name, at = _file_name(argv, at, word)
            words.files.append(name) if name else words.problems.append(_no_path("@"))
        elif not word.startswith("--") or word == "--":
            words.problems.append(_stray(word))
        elif equals:
            words.assignments.append(_assignment(root, typed, (attached,)))
        elif at < len(argv) and argv[at].startswith("@") and _takes_file(root, typed):
            name, at = _file_name(argv, at + 1, argv[at])
            path = _assignment(root, typed, None).path
            words.nested.append((path, name)) if name else words.problems.append(_no_path(f"{typed} @"))
        else:
            start = at
            while at < len(argv) and not argv[at].startswith(("--", "@")):
                at += 1
            own, extra = _own_words(root, typed, argv[start:at])
            words.assignments.append(_assignment(root, typed, own))
            words.problems.extend(_stray(stray) for stray in extra)
    return words


def _takes_file(root: type[Section], typed: str) -> bool:
    """Whether `--typed @ file` is about one table. `--clean @ run.toml` is a flag, then a file for the whole tree."""
    assignment = _assignment(root, typed, None)
    found = find(root, rename_path(root, assignment.path))
    return not assignment.negated and (not found or any(key.shape in ("table", "dict") for key in found))


def _file_name(argv: list[str], at: int, word: str) -> tuple[str, int]:
    """The path after an `@`, attached or the next word; "" when there is none."""
    if len(word) > 1:
        return word[1:], at
    if at < len(argv) and not argv[at].startswith(("--", "@")):
        return argv[at], at + 1
    return "", at


def _no_path(what: str) -> Problem:
    return Problem("needs the path of a config file after the @", key=what, origin=COMMAND_LINE)


def _stray(word: str) -> Problem:
    if FilePath(word).suffix in (".toml", ".yaml", ".yml", ".json"):
        return Problem(f"is a file without an @ before it. Write @ {word}", key=word, origin=COMMAND_LINE)
    return Problem(
        "belongs to no flag. Keys are written --key value, files @ file", key=word or '""', origin=COMMAND_LINE
    )


def _own_words(root: type[Section], typed: str, words: list[str]) -> tuple[tuple[str, ...] | None, list[str]]:
    """The words up to the next flag: those that are this flag's value, and the rest, which belong to no flag."""
    assignment = _assignment(root, typed, None)
    found = find(root, assignment.path)
    if assignment.negated:
        return None, words
    if any(key.shape == "list" for key in found):
        return (tuple(words) or None), []
    return (tuple(words[:1]) or None), words[1:]


def _assignment(root: type[Section], typed: str, words: tuple[str, ...] | None) -> _Assignment:
    """`--trainer.model.seq-len` as a path. `--no-a.b` and `--a.no-b` negate, unless there is a key of that name."""
    parts = typed.removeprefix("--").replace("-", "_").split(".")
    path = _path(parts)
    if words is None and not find(root, rename_path(root, path)):
        for index in (0, len(parts) - 1):
            if parts[index].startswith("no_"):
                positive = _path([*parts[:index], parts[index].removeprefix("no_"), *parts[index + 1 :]])
                if find(root, rename_path(root, positive)):
                    return _Assignment(positive, None, typed, negated=True)
    return _Assignment(path, words, typed)


def _path(parts: list[str]) -> Path:
    return tuple(int(part) if part.isdigit() else part for part in parts)


def _merge_file(root: type[Section], given: Given, path: Path, name: str) -> None:
    layer = len(given.files)
    given.files.append(name)
    try:
        content = read_file(name, layer)
    except ConfigError as error:
        given.problems.extend(error.problems)
        given.all_read = False
        return
    if path:
        content = _nest(content, path)
        if not find(root, rename_path(root, path)) and not _inside_dict(root, path):
            given.problems.append(unknown_key(root, path, COMMAND_LINE, f"{flag(path)} @ {name}"))
            return
    content, notices, problems = rename(root, content)
    given.notices.extend(notices)
    given.problems.extend(problems)
    given.draft.lay_over(content)


def _nest(content: Draft, path: Path) -> Draft:
    """The content of a file as if it stood below `path`."""
    values: Any = content.values
    for part in reversed(path):
        values = {part: values}
    return Draft(values, {(*path, *below): origin for below, origin in content.origins.items()})


def _assign(root: type[Section], given: Given, assignment: _Assignment) -> None:
    path = rename_path(root, assignment.path)
    if path != assignment.path:
        given.notices.append(f"{assignment.typed} is read as {flag(path)}")
    found = find(root, path)
    try:
        if found:
            value = _value(found, path, assignment)
            if found[0].shape == "dict":
                given.draft.drop(path)  # half of another placement is no placement
            given.draft.put(path, value, COMMAND_LINE)
        elif _inside_dict(root, path):
            given.draft.put(path, _loose(assignment), COMMAND_LINE)
        elif len(path) > 1 and isinstance(path[-1], int) and (above := find(root, path[:-1])):
            _put_item(given.draft, path, above[0], assignment)
        else:
            raise ConfigError([unknown_key(root, path, COMMAND_LINE, assignment.typed)])
    except ConfigError as error:
        given.problems.extend(error.problems)


def _value(found: list[Key], path: Path, assignment: _Assignment) -> Any:
    """The words of a flag as the kind of value that its key takes."""
    key, words = found[0], assignment.words
    if assignment.negated:
        if key.shape == "bool":
            return False
        if key.optional:
            return None
        if any("enabled" in keys(section) for section in key.variants):
            switch = flag((*path, "enabled")).replace("--", "--no-")
            raise _refuse(assignment, f"is a table that is always there. To turn it off, write {switch}")
        raise _refuse(assignment, f"cannot be turned off: it must be {key.wants}")
    if words is None:
        if key.shape == "bool" or key.has_bool:
            return True
        if key.shape == "table" and key.optional:
            return {}
        if key.shape == "table":
            raise _refuse(assignment, f"is a table, not a value. {_its_keys(key)}")
        raise _refuse(assignment, f"needs a value: {key.wants}")
    if key.shape == "list":
        return _list(words)
    text = words[0]
    if key.shape in ("table", "dict") and text != "None":
        if text.lstrip().startswith("{"):
            return _json(assignment, text)
        raise _refuse(assignment, f"is a table, not a value. {_its_keys(key)}", show(text))
    if key.shape == "bool":
        return _BOOLS.get(text.lower(), text)
    return text


def _list(words: tuple[str, ...]) -> Any:
    if words == ("None",):
        return None
    if len(words) == 1 and words[0].lstrip().startswith("["):
        with suppress(json.JSONDecodeError):
            return json.loads(words[0])
    return list(words)


def _json(assignment: _Assignment, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _refuse(assignment, f"is not valid JSON: {error.msg} (column {error.colno})", text) from None


def _loose(assignment: _Assignment) -> Any:
    """A value in a table of free names: JSON where it is JSON, else text."""
    if assignment.words is None:
        return not assignment.negated
    try:
        return json.loads(assignment.words[0])
    except json.JSONDecodeError:
        return assignment.words[0]


def _put_item(draft: Draft, path: Path, key: Key, assignment: _Assignment) -> None:
    """`--stop.0 x`: one item of a list that a file or the default gives, or the one after its last."""
    *above, index = path
    at = tuple(above)
    if key.shape != "list" or not isinstance(index, int):
        raise _refuse(assignment, f"has a number in it, but {flag(at)} is not a list")
    items = as_list(draft.get(at)) if draft.has(at) else None if key.default is REQUIRED else as_list(key.default)
    items = list(items or [])
    if index > len(items):
        raise _refuse(
            assignment, f"is out of reach: {flag(at)} has {len(items)} items. The next is {flag(at)}.{len(items)}"
        )
    if assignment.words is None:
        raise _refuse(assignment, "needs a value")
    items[index : index + 1] = [assignment.words[0]]
    draft.put(at, items, COMMAND_LINE)


def _inside_dict(root: type[Section], path: Path) -> bool:
    """Return whether `path` lies in a table of free names, such as `cluster.component_placement`."""
    return any(any(key.shape == "dict" for key in find(root, path[:length])) for length in range(1, len(path)))


def _refuse(assignment: _Assignment, what: str, value: str | None = None) -> ConfigError:
    return ConfigError([Problem(what, assignment.typed, value, COMMAND_LINE)])


def _its_keys(key: Key) -> str:
    if key.shape == "dict":
        return f"Write {flag((key.name,))}.<name> <value> or JSON"
    names = list(dict.fromkeys(name for section in key.variants for name in keys(section)))
    return "Its keys: " + ", ".join(name.replace("_", "-") for name in names[:8]) + (", ..." if len(names) > 8 else "")
