"""A config file becomes a draft: TOML, YAML or JSON, by its suffix."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any, cast

from ductile.config.reading.errors import ConfigError, Problem, did_you_mean
from ductile.config.reading.key_lines import json_lines, toml_lines
from ductile.config.reading.provenance import NOWHERE, Draft, Origin, Path, as_list, as_table
from ductile.user_files import BadPath, NotText, expanded, read_text

LineNumbers = dict[Path, int]
MAX_VALUES = 20_000
"""Many times what a config has. A few lines of YAML whose aliases contain each other can stand for millions."""
MAX_DEPTH = 60
_AT_LINE = re.compile(r" \(at line (\d+), column (\d+)\)$")
_YAML_FLOAT = re.compile(r"^[-+]?(?:\d[\d_]*)?\.?\d+(?:[eE][-+]?\d+)$")


def read_file(name: str, layer: int) -> Draft:
    """Values and lines of the file `name`.

    Raises:
        ConfigError: it is not there, not readable, or not what its suffix says; the message has the line.
    """
    try:
        values, lines = _read(expanded(name))
    except BadPath as error:
        raise ConfigError([Problem(str(error), key=f"@ {name}")]) from None
    except _Unreadable as error:
        origin = Origin(name, error.line, layer) if error.line else NOWHERE
        raise ConfigError([Problem(str(error), key=f"@ {name}", origin=origin)]) from None
    except RecursionError:  # `a: &x [*x]`, or ten thousand brackets
        raise ConfigError([Problem("is nested too deep, or in itself", key=f"@ {name}")]) from None
    return Draft(values, {path: Origin(name, line, layer) for path, line in lines.items()})


def _read(name: str) -> tuple[dict[str, Any], LineNumbers]:
    parse = _PARSERS.get(FilePath(name).suffix.lower())
    if parse is None:
        raise _Unreadable("has no suffix that says what it is. Config files end in .toml, .yaml, .yml or .json")
    try:
        text = read_text(FilePath(name))
    except FileNotFoundError:
        raise _Unreadable("does not exist." + _neighbour(name)) from None
    except OSError as error:
        raise _Unreadable(f"cannot be read: {error.strerror}") from None
    except NotText as error:
        raise _Unreadable(error.why) from None
    try:
        values, lines = parse(text)
    except ValueError as error:  # a date such as 2024-99-99, a number of five thousand digits
        raise _Unreadable(f"holds a value that cannot be read: {error}") from None
    if _is_deeper(values, MAX_DEPTH):
        raise RecursionError
    table = as_table(values if values is not None else {})
    if table is None:
        raise _Unreadable(f"holds a {type(values).__name__}; a config file holds a table of keys", 1)
    return table, lines


class _Unreadable(Exception):
    """Why a file is no config, and the line where that shows."""

    def __init__(self, what: str, line: int | None = None) -> None:
        super().__init__(what)
        self.line = line


def _neighbour(name: str) -> str:
    folder = FilePath(name).parent
    if not folder.is_dir():
        return f" Neither does the folder {folder}"
    known = [str(FilePath(name).with_name(other.name)) for other in folder.iterdir() if other.suffix in _PARSERS]
    return did_you_mean(name, known)


def _toml(text: str) -> tuple[Any, LineNumbers]:
    try:
        return tomllib.loads(text), toml_lines(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        at = _AT_LINE.search(message)
        line = int(at[1]) if at else text.count("\n") + 1
        column = f" (column {at[2]})" if at else ""
        said = _AT_LINE.sub("", message).removesuffix(" (at end of document)")
        raise _Unreadable(f"is not valid TOML: {said}{column}", line) from None


def _json(text: str) -> tuple[Any, LineNumbers]:
    lines = json_lines(text)

    def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            twin = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
            line = max((line for path, line in lines.items() if path and path[-1] == twin), default=1)
            raise _Unreadable(f'has the key "{twin}" twice in one table', line)
        return table

    try:
        return json.loads(text, object_pairs_hook=no_twins), lines
    except json.JSONDecodeError as error:
        raise _Unreadable(f"is not valid JSON: {error.msg} (column {error.colno})", error.lineno) from None


def _yaml(text: str) -> tuple[Any, LineNumbers]:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.2's floats: `1e-6` is a number, not text."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _YAML_FLOAT, list("-+0123456789."))  # pyright: ignore[reportUnknownMemberType]
    lines: LineNumbers = {}

    num_values = 0

    def visit(node: object, path: Path) -> None:
        nonlocal num_values
        num_values += 1
        if num_values > MAX_VALUES:
            raise _Unreadable(f"holds more than {MAX_VALUES:,} values, as its aliases stand for others again and again")
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                word, line = str(key.value), int(key.start_mark.line) + 1
                if word in seen:
                    raise _Unreadable(f'has the key "{word}" twice in one table', line)
                seen.add(word)
                lines[(*path, word)] = line
                visit(value, (*path, word))
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                lines[(*path, index)] = int(item.start_mark.line) + 1
                visit(item, (*path, index))

    try:
        loader = Loader(text)
        node = cast(Any, loader.get_single_node())
        if node is None:
            return {}, {}
        visit(node, ())
        return _text_keys(cast(Any, loader).construct_document(node)), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, f" (column {mark.column + 1})") if mark else (1, "")
        raise _Unreadable(f"is not valid YAML: {error.problem or error.context}{column}", line) from None
    except yaml.YAMLError as error:
        raise _Unreadable(f"is not valid YAML: {error}", 1) from None


def _text_keys(value: Any) -> Any:
    """YAML allows `1: x`; a config's keys are text."""
    if isinstance(value, dict):
        return {str(key): _text_keys(item) for key, item in cast(dict[Any, Any], value).items()}
    return value


def _is_deeper(value: Any, limit: int) -> bool:
    if limit < 0:
        return True
    table = as_table(value)
    items = (as_list(value) or []) if table is None else list(table.values())
    return any(_is_deeper(item, limit - 1) for item in items)


_PARSERS: dict[str, Callable[[str], tuple[Any, LineNumbers]]] = {
    ".toml": _toml,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": _json,
}
