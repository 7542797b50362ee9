"""On which line does each key of a file stand? The parsers of TOML and JSON do not say; this scanner does.

It runs over text that the real parser has accepted, so it may be lax: it only has to find keys, skip values, and count
lines. A JSON document is one inline value of TOML's kind, with `:` for `=`.
"""

import re

from ductile.config.reading.provenance import Path

_BLANK = re.compile(r"(?:[\s,]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"|\'([^\']*)\'')
_STRING = re.compile(r'"""(?:[^\\]|\\.)*?"""+|\'\'\'.*?\'\'\'+|"(?:[^"\\]|\\.)*"|\'[^\']*\'', re.DOTALL)
_SCALAR = re.compile(r"[^,\]}\n#]*")


def toml_lines(text: str) -> dict[Path, int]:
    """Line (from 1) of every key, table header and list item of a TOML document."""
    scan = _Scan(text)
    table: Path = ()
    counts: dict[Path, int] = {}
    while not scan.done():
        if scan.take("[["):
            *above, last = scan.key()
            name = (*_inside_lists(tuple(above), counts), last)
            index = counts.get(name, 0)
            counts[name] = index + 1
            table = (*name, index)
            scan.mark(table)
            scan.take("]]")
        elif scan.take("["):
            table = _inside_lists(scan.key(), counts)
            scan.mark(table)
            scan.take("]")
        else:
            scan.pair(table, "=")
    return scan.lines


def json_lines(text: str) -> dict[Path, int]:
    """Line (from 1) of every key and list item of a JSON document."""
    scan = _Scan(text)
    if not scan.done():
        scan.value((), ":")
    return scan.lines


def _inside_lists(name: Path, counts: dict[Path, int]) -> Path:
    """`[a.b]` and `[[a.b]]` below `[[a]]` belong to the last item of `a`."""
    path: Path = ()
    for part in name:
        path = (*path, part)
        if path in counts:
            path = (*path, counts[path] - 1)
    return path


class _Scan:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {}

    def done(self) -> bool:
        """Skip blanks, commas and comments. True at the end."""
        self._skip(_BLANK)
        return self.at >= len(self.text)

    def take(self, token: str) -> bool:
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        return True

    def mark(self, path: Path) -> None:
        """Note the line for `path`, and for the tables above it that have none yet."""
        line = self.text.count("\n", 0, self.at) + 1
        self.lines[path] = line
        for length in range(1, len(path)):
            self.lines.setdefault(path[:length], line)

    def key(self) -> Path:
        """A dotted key: `a."b c".d`."""
        parts: list[str] = []
        while True:
            self._skip(_SPACE)
            if quoted := _QUOTED.match(self.text, self.at):
                parts.append(quoted[1] if quoted[1] is not None else quoted[2])
                self.at = quoted.end()
            elif bare := _BARE.match(self.text, self.at):
                parts.append(bare[0])
                self.at = bare.end()
            else:
                self.at += 1  # cannot happen in accepted text; never stand still
            self._skip(_SPACE)
            if not self.take("."):
                return tuple(parts)

    def pair(self, table: Path, equals: str) -> None:
        path = (*table, *self.key())
        self.mark(path)
        self._skip(_BLANK)
        self.take(equals)
        self.value(path, equals)

    def value(self, path: Path, equals: str) -> None:
        self._skip(_BLANK)
        if self.take("{"):
            while not self.done() and not self.take("}"):
                self.pair(path, equals)
        elif self.take("["):
            index = 0
            while not self.done() and not self.take("]"):
                self.mark((*path, index))
                self.value((*path, index), equals)
                index += 1
        elif string := _STRING.match(self.text, self.at):
            self.at = string.end()
        else:
            self._skip(_SCALAR)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
