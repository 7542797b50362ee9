"""Which keys does a command read? Found in the source, from the command's entry on.

A node is a function, a class with all its methods, or a constant at a module's top level. Its edges are the names of
the package that it uses, and the texts that name code ("ductile.generator.server.serve"). What a command reads is every
attribute in the nodes that can be reached from its `run_...` function: parsing, checks and help are not among them.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import ductile

SOURCE = Path(ductile.__file__).parent
_NAMES_CODE = re.compile(r"ductile(\.\w+)+(:\w+)?")


@dataclass
class Module:
    imported: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """What a name stands for: (module, name there)."""
    nodes: dict[str, ast.stmt] = field(default_factory=dict[str, ast.stmt])


@cache
def attributes_read(module: str, name: str) -> frozenset[str]:
    """Every attribute that code reached from `module.name` reads."""
    reached: set[tuple[str, str]] = set()
    to_visit = [(module, name)]
    read: set[str] = set()
    while to_visit:
        node = to_visit.pop()
        if node in reached or node[1] not in _modules().get(node[0], Module()).nodes:
            continue
        reached.add(node)
        tree = _modules()[node[0]].nodes[node[1]]
        read |= {part.attr for part in ast.walk(tree) if isinstance(part, ast.Attribute)}
        read |= set(_looked_up(tree))
        to_visit += _edges(node[0], tree)
    return frozenset(read)


def _looked_up(tree: ast.stmt) -> Iterator[str]:
    """`limits["max_processes"]`: keys of a section that was sent to another process as plain values."""
    for part in ast.walk(tree):
        if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant):
            yield str(part.slice.value)


def _edges(module: str, tree: ast.stmt) -> Iterator[tuple[str, str]]:
    known = _modules()[module]
    for part in ast.walk(tree):
        if isinstance(part, ast.Name):
            yield known.imported.get(part.id, (module, part.id))
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            source, name = known.imported.get(part.value.id, ("", ""))
            yield f"{source}.{name}", part.attr  # `loss_aggregation.weigh`, where a module was imported
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and _NAMES_CODE.fullmatch(part.value):
            source, _, name = part.value.partition(":")
            yield source, name or "main"
        elif isinstance(part, ast.ImportFrom):
            yield from ((part.module or "", alias.name) for alias in part.names)


@cache
def _modules() -> dict[str, Module]:
    found: dict[str, Module] = {}
    for file in SOURCE.rglob("*.py"):
        parts = ("ductile", *file.relative_to(SOURCE).with_suffix("").parts)
        module = found.setdefault(".".join(parts).removesuffix(".__init__"), Module())
        for statement in ast.parse(file.read_text()).body:
            if isinstance(statement, ast.ImportFrom):
                names = {alias.asname or alias.name: (statement.module or "", alias.name) for alias in statement.names}
                module.imported |= names
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                module.nodes[statement.name] = statement
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                module.nodes |= {target.id: statement for target in targets if isinstance(target, ast.Name)}
    return found
