"""One public class name is one class, and docstrings of fields, constants and type aliases stand alone: a reader sees
one without its neighbours."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import ductile

SOURCE = Path(ductile.__file__).parent
FRAGMENT = re.compile(r"\s*(That|Of|By|In|For|As|With|From|And|Before|During|Until|While|Once)\b")
"""How a text begins that goes on with another one, such as "Of one slot alone." after a name."""


def test_no_attribute_docstring_is_a_fragment() -> None:
    found = [
        f"{file.relative_to(SOURCE.parents[1])}:{line}: {text}"
        for file in sorted(SOURCE.rglob("*.py"))
        for line, text in fragments(file.read_text(encoding="utf-8"))
    ]
    advice = 'write what the value is, as in "Seconds that the slowest rank waited." instead of "Of the slowest rank."'
    assert not found, "\n".join([f"{len(found)} docstrings are fragments; {advice}", *found])


def test_no_docstring_of_a_module_a_class_or_a_function_is_a_fragment() -> None:
    found = [
        f"{file.relative_to(SOURCE.parents[1])}: {text.splitlines()[0]}"
        for file in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and FRAGMENT.match(text := ast.get_docstring(node) or "")
    ]
    assert not found, "\n".join(found)


def test_fragments_are_found_under_fields_constants_and_attributes_of_self() -> None:
    source = '''"""For a module this is no fragment."""
LIMIT = 3
"""Of one slot."""
Row = tuple[int, str]
"""A row: (number, name)."""

class Box:
    """As in a picture."""
    x: int
    """Offset from the left."""
    y: int = 0
    """
    From above, in
    pixels.
    """
    def __init__(self) -> None:
        """With nothing in it."""
        self.z = 1
        """And depth."""
        self.inside = 2
        """Inside the box. Of no use here."""
'''
    assert list(fragments(source)) == [(3, "Of one slot."), (12, "From above, in pixels."), (19, "And depth.")]


def test_one_public_class_name_is_one_class() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for file in sorted(SOURCE.rglob("*.py")):
        for name in public_classes(file.read_text(encoding="utf-8")):
            homes[name].append(str(file.relative_to(SOURCE.parents[1])))
    assert homes["Loop"] == ["src/ductile/loop/loop.py"], "the walk finds classes"
    found = [f"{name}: {', '.join(files)}" for name, files in sorted(homes.items()) if len(files) > 1]
    advice = "keep the name for the class that it fits best, and call the others what they are"
    assert not found, "\n".join([f"{len(found)} names are defined more than once; {advice}", *found])


def test_public_classes_are_found_at_any_depth() -> None:
    source = """
class Outer:
    class Inner:
        pass

    class _Hidden:
        class Deep:
            pass

def make():
    class Local:
        pass

if True:
    class Outer:
        pass
"""
    assert sorted(public_classes(source)) == ["Deep", "Inner", "Local", "Outer", "Outer"]


def public_classes(source: str) -> Iterator[str]:
    """Name of each class that is defined without a leading underscore, nested ones and those of functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def fragments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each attribute docstring that is a fragment, from the first line to the last."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                found += _in_block(block)
    yield from sorted(found)


def _in_block(block: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for statement, after in pairwise(block):
        match statement, after:
            case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))) if FRAGMENT.match(text):
                yield after.lineno, " ".join(text.split())
            case _:
                pass
