"""No module imports itself through others, inside packages neither."""

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"


def imports(source: str, modules: Mapping[str, str]) -> set[str]:
    """Our modules that a module imports, whenever that is; not for type checkers only."""
    tree, found = ast.parse(source), set[str]()
    checked = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in checked:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & modules.keys() or {node.module}
    return found & modules.keys()


def cycle(modules: Mapping[str, str]) -> list[str]:
    """Modules of a cycle, the first one again at the end; empty when there is none."""
    try:
        TopologicalSorter({name: imports(source, modules) for name, source in modules.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_through_others() -> None:
    modules = {
        ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__"): path.read_text("utf-8")
        for path in SOURCES.rglob("*.py")
    }
    assert len(modules) > 200
    assert cycle(modules) == []


@pytest.mark.parametrize("line", ["from a.c import x", "import a.c", "from a import c", "def f():\n    import a.c"])
def test_a_cycle_is_found(line: str) -> None:
    assert sorted({*cycle({"a": "", "a.b": line, "a.c": "from a.b import y"})}) == ["a.b", "a.c"]
    assert cycle({"a": "", "a.b": "if TYPE_CHECKING:\n    from a.c import x", "a.c": "from a.b import y"}) == []
