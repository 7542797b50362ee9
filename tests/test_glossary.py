"""docs/glossary.md has each record, each class of the roles and each kind of event under the name that the code has,
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
Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_every_record_and_role_has_a_row() -> None:
    classes = {name for file in ("records.py", "roles.py") for name in public_classes(parsed(SOURCE / file))}
    missing = sorted(classes - first_column(PAGE.read_text(encoding="utf-8")))
    assert not missing, f"docs/glossary.md has no row for {missing}: its first column has each name in backticks"


def test_every_kind_of_event_has_a_row() -> None:
    missing = sorted(kinds_of_the_tree() - first_column(events_of(PAGE.read_text(encoding="utf-8"))))
    advice = "where this is a place in a file, write the kind there as a literal"
    assert not missing, f"docs/glossary.md has no row under Events for {missing}; {advice}"


def test_every_word_of_the_first_column_is_a_name_of_the_code() -> None:
    kinds = kinds_of_the_tree()
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


def test_kinds_are_read_from_literals_conditions_variables_and_parameters() -> None:
    source = """
class Log:
    def event(self, kind, sentence, **fields):
        return LoggedEvent(time(), kind, sentence, fields)

    def full(self):
        return LoggedEvent(time(), "full", "")

    def one(self, before):
        self.record.event("back" if before else "on", "")
        kind = "two" if before else "one"
        listener = lambda sentence: self.record.event(kind, sentence)
        self._told("three")

    def _told(self, kind):
        self.record.event(kind, "")

def told(where, kind):
    where.record.event(kind, "")

told(None, "four")
told(None, kind="five")
asked = asyncio.Event()
"""
    expected = {"full", "back", "on", "one", "two", "three", "four", "five"}
    assert set(kinds(ast.parse(source), "a.py")) == expected


def test_where_a_kind_cannot_be_read_the_place_stands_for_it() -> None:
    for source in ('record.event(f"{x}d", "")', "record.event(kind, '')", "def f(kind): record.event(kind, '')"):
        assert set(kinds(ast.parse(source), "a.py")) == {"a.py:1"}


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


def kinds_of_the_tree() -> set[str]:
    return {kind for file in SOURCE.rglob("*.py") for kind in kinds(parsed(file), str(file.relative_to(ROOT)))}


def kinds(tree: ast.Module, file: str) -> Iterator[str]:
    """Kinds of the events that the module makes, by `anything.event(kind, ...)` or `LoggedEvent(time_s, kind, ...)`.

    Where a kind cannot be read from the source, the place stands for it: "src/ductile/observe.py:72".
    """
    for call, function in _calls(tree, None):
        match call:
            case ast.Call(func=ast.Attribute(attr="event"), args=[kind, *_]):
                yield from _texts(kind, function, tree, f"{file}:{call.lineno}")
            case ast.Call(func=ast.Name(id="LoggedEvent"), args=[_, kind, *_]):
                yield from _texts(kind, function, tree, f"{file}:{call.lineno}")
            case _:
                pass


def _calls(node: ast.AST, function: Function | None) -> Iterator[tuple[ast.Call, Function | None]]:
    """Each call and the function around it. A lambda belongs to the function in which it stands."""
    if isinstance(node, ast.Call):
        yield node, function
    around = node if isinstance(node, Function) else function
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, around)


def _texts(kind: ast.expr, function: Function | None, tree: ast.Module, where: str) -> set[str]:
    """What `kind` may be: a literal, one of two, what its variable is set to, or what its function is called with."""
    match kind:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.IfExp(body=body, orelse=orelse):
            return _texts(body, function, tree, where) | _texts(orelse, function, tree, where)
        case ast.Name(id=name) if function is not None:
            if function.name == "event":
                return set()  # every call of it is read where it stands
            values = [*_assigned(name, function), *_passed(name, function, tree)]
            if values:
                return {text for value in values for text in _texts(value, None, tree, where)}
        case _:
            pass
    return {where}


def _assigned(name: str, function: Function) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                yield value
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                yield value
            case _:
                pass


def _passed(name: str, function: Function, tree: ast.Module) -> Iterator[ast.expr]:
    """What the calls in the module pass as the argument `name` of the function."""
    positional = [each.arg for each in (*function.args.posonlyargs, *function.args.args) if each.arg != "self"]
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if called == function.name:
                yield from (keyword.value for keyword in node.keywords if keyword.arg == name)
                yield from (value for each, value in zip(positional, node.args, strict=False) if each == name)
            case _:
                pass


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
