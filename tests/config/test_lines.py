"""Keys are found on their lines; a dumb twin checks what the scanner finds in documents of every shape."""

import json
import tomllib
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from ductile.config.reading.key_lines import json_lines, toml_lines
from ductile.config.reading.provenance import Path

TOML = '''\
# a comment with [a.table] and key = 1
top = 1
"quoted key" = 2 # trailing
a.b.'c d' = 3

[table]
text = """
[not.a.table]
not_a_key = 1
"""
raw = \'\'\'
x = 1\'\'\'
list = [
    1, # one
    "two, [2]",
    { x = 1, y = { z = 2 } },
]
inline = { p = 1, "q.r" = [1, 2] }
after = 5

[[items]]
name = "first"

[[items]]
name = "second"
[items.sub]
deep = true
[[items.steps]]
x = 1
[[items]]
[[items.steps]]
x = 2

[ spaced . out ]
date = 1979-05-27T07:32:00Z
'''

LINES: dict[Path, int] = {
    ("top",): 2,
    ("quoted key",): 3,
    ("a",): 4,
    ("a", "b", "c d"): 4,
    ("table",): 6,
    ("table", "text"): 7,
    ("table", "raw"): 11,
    ("table", "list"): 13,
    ("table", "list", 0): 14,
    ("table", "list", 1): 15,
    ("table", "list", 2, "y", "z"): 16,
    ("table", "inline", "q.r"): 18,
    ("table", "inline", "q.r", 1): 18,
    ("table", "after"): 19,
    ("items", 0, "name"): 22,
    ("items", 1, "name"): 25,
    ("items", 1, "sub", "deep"): 27,
    ("items", 1, "steps", 0, "x"): 29,
    ("items", 2, "steps", 0, "x"): 32,
    ("spaced", "out", "date"): 35,
}


@pytest.mark.parametrize(("path", "line"), LINES.items())
def test_toml(path: Path, line: int) -> None:
    tomllib.loads(TOML)
    assert toml_lines(TOML)[path] == line


def test_nothing_is_found_that_is_not_there() -> None:
    found = {path for path in toml_lines(TOML) if "not" in str(path) or "x = 1" in str(path)}
    assert found == set()


def test_json() -> None:
    text = '{"a": 1,\n "b": {"c": [1,\n 2, {"d": "}{"}]},\n\n "e, f": null}'
    assert json_lines(text) == {
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 2,
        ("b", "c", 0): 2,
        ("b", "c", 1): 3,
        ("b", "c", 2): 3,
        ("b", "c", 2, "d"): 3,
        ("e, f",): 5,
    }


text = st.text(st.characters(codec="utf-8", exclude_characters="\r\x85\u2028\u2029"), max_size=8)
scalar = st.one_of(st.integers(-1000, 1000), st.booleans(), st.floats(allow_nan=False), text)
key = st.sampled_from("abc") | text
"""Mostly plain ones: two tables of a list often have the same, as in real configs."""
value = st.recursive(scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(key, inner, max_size=3))
document = st.dictionaries(key, value, max_size=4)


def paths(node: Any, at: Path = ()) -> set[Path]:
    """Every key and item of a document: the dumb twin, which reads values instead of text."""
    found: set[Path] = set()
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, inner in pairs:
        found |= {(*at, key)} | paths(inner, (*at, key))
    return found


@given(document)
def test_every_key_of_a_json_document_is_found(tree: dict[str, Any]) -> None:
    written = json.dumps(tree, indent=1, ensure_ascii=True)
    # A key with an escape in it is known by its escaped spelling: it is no key of ours anyhow.
    words = {path: [part for part in path if isinstance(part, str)] for path in paths(tree)}
    plain = {path for path, parts in words.items() if all(json.dumps(part)[1:-1] == part for part in parts)}
    assert plain <= set(json_lines(written))


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), value, max_size=4))
def test_every_key_of_a_toml_document_is_found(tree: dict[str, Any]) -> None:
    written = tomli_w.dumps(tree)
    found = set(toml_lines(written))
    plain = {path for path in paths(tree) if all(str(part).isalnum() and str(part).isascii() for part in path)}
    assert plain <= found
