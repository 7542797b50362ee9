"""docs/glossary.md has each record, each class of the roles and each event under the name that the code has,
and no other names.

The tests read the source files and import none.
"""

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ductile"
PAGE = ROOT / "docs" / "glossary.md"
QUOTED = re.compile(r"`([^`]+)`")


def test_every_record_and_role_has_a_row() -> None:
    classes = {name for file in ("records.py", "roles.py") for name in public_classes(parsed(SOURCE / file))}
    missing = sorted(classes - first_column(PAGE.read_text(encoding="utf-8")))
    assert not missing, f"docs/glossary.md has no row for {missing}: its first column has each name in backticks"


def test_every_event_has_a_row_with_its_kind_and_its_class() -> None:
    written = set(chain.from_iterable(events_of_the_tree().items()))
    missing = sorted(written - first_column(events_of(PAGE.read_text(encoding="utf-8"))))
    assert not missing, f"docs/glossary.md has no row under Events for {missing}"


def test_every_event_is_written_by_something() -> None:
    called = set(chain.from_iterable(names_called(parsed(file)) for file in SOURCE.rglob("*.py")))
    unwritten = sorted(set(events_of_the_tree().values()) - called)
    assert not unwritten, f"nothing makes events of {unwritten}"


def test_every_word_of_the_first_column_is_a_name_of_the_code() -> None:
    kinds = set(events_of_the_tree())
    names = set(chain.from_iterable(names_of(parsed(file)) for file in SOURCE.rglob("*.py")))
    text = PAGE.read_text(encoding="utf-8")
    wrong = sorted(first_column(text) - names - kinds)
    assert not wrong, f"docs/glossary.md: src/ductile has no {wrong}: write what the code calls them now"
    events = events_of(text)
    wrong = sorted(word for word in first_column(events) - kinds if word.islower())
    assert not wrong, f"docs/glossary.md: nothing writes events of the kinds {wrong}"


def test_every_row_has_a_word_and_a_meaning_and_no_cell_too_many() -> None:
    for table in tables(PAGE.read_text(encoding="utf-8")):
        for row in table:
            assert len(row) == len(table[0]), row
            assert all(row[:2]), row


def test_the_first_column_is_read_from_every_table() -> None:
    text = "`no`\n\n| word `no` | is |\n|---|---|\n| a, `B`, `c` | `no` |\n| d | e |\n"
    text += "\n## Events\n\n| x |\n|---|\n| `f` |\n"
    assert first_column(text) == {"B", "c", "f"}
    assert first_column(events_of(text)) == {"f"}


def test_events_are_classes_with_a_tag() -> None:
    source = """
class Base(RunEvent):
    pass

class Saved(Base, tag="saved"):
    pass

class Unread(Base, tag=""):
    pass
"""
    assert events(ast.parse(source)) == {"saved": "Saved"}


def test_calls_are_found_where_a_class_is_chosen() -> None:
    source = "record.event(Saved(3))\n(Resized if done else Back)(1)\nended(Died)\n"
    assert set(names_called(ast.parse(source))) == {"Saved", "Resized", "Back", "done", "ended"}


def test_names_are_what_the_code_defines() -> None:
    source = """
Color = Literal["red", 2]
class Box(Base):
    size: int = 3
    def grow(self, by, *, most=None):
        self.grown = other.used
        for each, (first, last) in by: pass
"""
    names = set(names_of(ast.parse(source)))
    assert {"Color", "red", "Box", "size", "grow", "by", "most", "grown", "each", "first", "last"} <= names
    assert names.isdisjoint({"Base", "other", "used", "int", "Literal"})


# -- The page


def tables(text: str) -> list[list[list[str]]]:
    """Each table of the page as its rows, without the head; each row as its cells."""
    found: list[list[list[str]]] = []
    before = ""
    for line in text.splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append([])
            found[-1].append([cell.strip() for cell in line.rstrip()[1:-1].split("|")])
        before = line
    return [rows[2:] for rows in found]


def first_column(text: str) -> set[str]:
    """Words in backticks in the first column of the text's tables."""
    return {word for table in tables(text) for row in table for word in QUOTED.findall(row[0])}


def events_of(text: str) -> str:
    return text.partition("\n## Events\n")[2]


# -- The code


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def public_classes(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def names_of(tree: ast.AST) -> Iterator[str]:
    """What the module defines: classes, functions, arguments, what is assigned to, and the words of each Literal."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.Subscript(value=ast.Name(id="Literal"), slice=words):
                yield from (text for text in map(_text, ast.walk(words)) if text)
            case _:
                pass


def events_of_the_tree() -> dict[str, str]:
    """Kinds of events in `events.jsonl`, each with the name of its class."""
    files = [*(SOURCE / "events").glob("*.py"), SOURCE / "observe.py"]
    return {kind: name for file in files for kind, name in events(parsed(file)).items()}


def events(tree: ast.Module) -> dict[str, str]:
    """Kind and name of each class of the module that has a tag."""
    return {
        _text(keyword.value): node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for keyword in node.keywords
        if keyword.arg == "tag" and _text(keyword.value)
    }


def names_called(tree: ast.Module) -> Iterator[str]:
    """Names of what the module calls; of a conditional expression that is called, all names in it."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)):
                yield name
            case ast.Call(func=ast.IfExp() as either):
                yield from (each.id for each in ast.walk(either) if isinstance(each, ast.Name))
            case _:
                pass


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
