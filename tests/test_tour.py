"""docs/tour.md names files that exist, and of each file what it defines.

The tests read the source files and import none.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ductile"
PAGE = ROOT / "docs" / "tour.md"
OUTSIDE = ("src/", "tests/", "docs/", "benchmarks/")
"""Beginnings of the paths that do not begin at `src/ductile/`."""
VOCABULARY = ("records.py", "roles.py", "messages/workers.py", "messages/resizes.py")
"""Files whose names stand in every line."""
QUOTED = re.compile(r"`([^`]+)`")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")
NUMBER = re.compile(r"(\d+)\. ")


def test_every_path_and_name_of_the_tour_is_there() -> None:
    found = wrong(PAGE.read_text(encoding="utf-8"))
    assert not found, "\n".join(["docs/tour.md: write what the code calls them now, and where it is", *found])


def test_every_step_of_a_walk_begins_with_a_file_and_has_the_next_number() -> None:
    walks = [part for part in PAGE.read_text(encoding="utf-8").split("\n## ") if NUMBER.search(part)]
    assert len(walks) == 5
    for walk in walks:
        steps = [line for line in walk.splitlines() if NUMBER.match(line)]
        assert [line.partition(".")[0] for line in steps] == [str(n) for n in range(1, len(steps) + 1)]
        assert [line for line in steps if not is_path(QUOTED.findall(line)[0])] == []


def test_every_change_names_the_test_that_holds_it() -> None:
    rows = PAGE.read_text(encoding="utf-8").partition("| held by |\n|---|---|---|\n")[2].splitlines()
    assert len(rows) > 20
    assert [row for row in rows if not row.split("|")[-2].startswith(" `tests/")] == []


def test_what_is_not_there_is_found() -> None:
    page = """
1. `orchestrator/loop/loop.py` `Loop.run` and `Loop.go`, `Loop.step`, `Loopy` and `Sample`.
2. `loop/lop.py` `Loop`; `orchestrator/`, `loops/`, `tests/test_tour.py` `PAGE`,
   `NAMES` and `two words`.
3. `Finished` and `finished`.
"""
    assert wrong(page) == [
        "orchestrator/loop/loop.py has no Loop.go",
        "orchestrator/loop/loop.py has no Loopy",
        "there is no loop/lop.py",
        "there is no loops/",
        "tests/test_tour.py has no NAMES",
        "no file stands before finished",
    ]


def test_names_are_those_that_a_module_and_its_classes_define() -> None:
    source = """
from other import Imported
LIMIT: int = 3
Both = A | B
class Box:
    size: int
    def grow(self):
        inner = 1
        self.grown: bool = True
async def ask(): ...
"""
    assert set(names_of(ast.parse(source))) == {"LIMIT", "Both", "Box", "Box.size", "Box.grow", "Box.grown", "ask"}


def wrong(page: str) -> list[str]:
    """A sentence for each path that does not exist, and for each name that is not defined where the page says."""
    found: list[str] = []
    for entry in entries(page):
        path = ""
        for word in QUOTED.findall(entry):
            if is_path(word):
                path = word
                if not there(path).exists():
                    found.append(f"there is no {path}")
            elif NAME.fullmatch(word) and not any(word in defined(file) for file in (*VOCABULARY, path)):
                if not path:
                    found.append(f"no file stands before {word}")
                elif there(path).is_file():
                    found.append(f"{path} has no {word}")
    return found


def entries(page: str) -> list[str]:
    """Each line of the page, with the indented ones that go on after it."""
    return re.sub(r"\n +", " ", page).splitlines()


def is_path(word: str) -> bool:
    return "/" in word or word.endswith((".py", ".md"))


def there(path: str) -> Path:
    return (ROOT if path.startswith(OUTSIDE) else SOURCE) / path


@cache
def defined(path: str) -> frozenset[str]:
    """Names that the file defines; none where it is no Python file."""
    file = there(path)
    if file.suffix != ".py" or not file.is_file():
        return frozenset()
    return frozenset(names_of(ast.parse(file.read_text(encoding="utf-8"), path)))


def names_of(tree: ast.Module) -> Iterator[str]:
    """Names of the module, and `Class.member` for what its classes define, attributes of `self` included."""
    for node in tree.body:
        yield from _defined_by(node)
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for member in node.body for name in _defined_by(member))
            for each in ast.walk(node):
                match each:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                        yield f"{node.name}.{name}"
                    case _:
                        pass


def _defined_by(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Assign(targets=targets):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        case _:
            pass
