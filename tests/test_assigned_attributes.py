"""No object assigns another's attributes: what one wants of another it says in the constructor, or by a call."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "ductile"
STAYS = {
    "asked.run": "a namespace of argparse",
    "module.weight.data": "a parameter of torch",
    "parameter.data": "as `module.weight.data`",
    "phase.metrics": "the block that a phase goes with says what has come of it (`ductile.events.phases`)",
    "phase.num_bytes": "as `phase.metrics`",
    "phase.report": "as `phase.metrics`",
    "sequence.blocks": "the scheduler gives sequences their blocks of the cache",
    "sequence.imported": "as `sequence.blocks`",
    "sequence.num_computed": "as `sequence.blocks`",
    "sequence.num_registered": "as `sequence.blocks`",
    "sequence.weights_serial": "as `sequence.blocks`",
}
"""Assignments that stay, with the reason."""
Sources = Mapping[str, str]


def assigned(node: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that the statement assigns."""
    match node:
        case ast.Assign(targets=targets):
            pass
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            targets = [target]
        case _:
            return
    for target in targets:
        for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            if isinstance(part, ast.Attribute):
                yield part


def is_own(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


def homes(sources: Sources) -> dict[str, set[str]]:
    """Modules in which a class has the attribute, by attribute."""
    found = defaultdict[str, set[str]](set)
    for module, source in sources.items():
        for each in ast.walk(ast.parse(source)):
            for node in ast.walk(each) if isinstance(each, ast.ClassDef) else ():
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found[node.target.id].add(module)
                for attribute in assigned(node):
                    if is_own(attribute):
                        found[attribute.attr].add(module)
    return found


def foreign(sources: Sources) -> dict[str, str]:
    """Assignments to attributes that classes of other modules have, and none of the module itself, with their place.

    An attribute that no class of ours has is a library's, and so is any of `ctx`, a context of torch.autograd.
    """
    known, found = homes(sources), dict[str, str]()
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            for attribute in assigned(node):
                if ast.unparse(attribute.value) == "ctx":
                    continue
                if not is_own(attribute) and known[attribute.attr] and module not in known[attribute.attr]:
                    found[ast.unparse(attribute)] = f"{module}:{attribute.lineno}"
    return found


@pytest.fixture(scope="module")
def sources() -> Sources:
    return {str(path.relative_to(SOURCES)): path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py")}


def test_no_object_assigns_another_s_attributes(sources: Sources) -> None:
    assert {what: where for what, where in foreign(sources).items() if what not in STAYS} == {}


def test_every_exception_is_needed(sources: Sources) -> None:
    assert STAYS.keys() - foreign(sources).keys() == set()


def test_what_is_assigned_from_outside_is_found() -> None:
    home = "class Loop:\n    def __init__(self):\n        self.controller, self._step = None, 0\n"
    other = "def f(loop, x):\n    loop.controller, y = x, 1\n    loop._step += 1\n    x.errno = 3\n"
    assert foreign({"loop.py": home, "f.py": other}) == {"loop.controller": "f.py:2", "loop._step": "f.py:3"}
    assert foreign({"loop.py": home + other}) == {}
