"""Code that a config names: `package.module.attribute`, or `file.py:attribute`.

Packages are found in the folder where the command was started, too, and there last of all: a file that happens to lie
in it never takes the place of a library.
"""

import ast
import importlib
import importlib.util
import os
import re
import sys
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from ductile.config.reading.errors import did_you_mean
from ductile.error_text import error_with_place

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")
_IN_FILE = re.compile(r"(.+\.py):[A-Za-z_]\w*")


class ImportPathError(Exception):
    """The text is a sentence that names the path and what is wrong with it."""


def import_object(import_path: str) -> Any:
    """What `import_path` names.

    Raises ImportPathError when the module or file cannot be imported, or has no such attribute.
    """
    separator = ":" if ":" in import_path else "."
    source, _, attribute = import_path.rpartition(separator)
    if not source or not attribute:
        raise ImportPathError(f"{import_path!r} is not an import path; write package.module.name or file.py:name")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module = _load_file(Path(source), import_path) if source.endswith(".py") else _load_module(source, import_path)
    if attribute not in vars(module):
        # A library's module of the same name may have been found instead of the user's.
        where = f" (found in {module.__file__})" if module.__file__ else ""
        near = did_you_mean(attribute, vars(module), ". Did you mean {}?")
        raise ImportPathError(f"{import_path!r}: {source} has no {attribute!r}{where}{near}")
    return vars(module)[attribute]


def source_of(import_path: str) -> Path | None:
    """Return the file that `import_path` names something in, found without running any; None where there is none."""
    if _IN_FILE.fullmatch(import_path):
        file = Path(import_path.rpartition(":")[0])
        return file if file.is_file() else None
    where: list[str] | None = [*sys.path, os.getcwd()]
    found: Path | None = None
    for name in accumulate(re.split(r"[.:]", import_path), "{}.{}".format):
        spec = None if where is None else PathFinder.find_spec(name, where)
        if spec is None:  # the attribute, of what was found last
            break
        found = Path(spec.origin) if spec.origin else None
        where = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    return found if found is not None and found.is_file() else None


def unfit(import_path: str) -> str:
    """What keeps `import_path` from being imported, as far as can be seen without running it; "" when nothing does.

    A file is parsed, and should define the name somewhere. Of a package only the outermost is looked for.
    """
    if _IN_FILE.fullmatch(import_path):
        file, _, attribute = import_path.rpartition(":")
        return _unfit_file(Path(file), attribute)
    if import_path.endswith(".py"):
        return f"names a file and nothing in it: write {import_path}:name"
    if _DOTTED.fullmatch(import_path) is None:
        return "is not an import path: write package.module.name or file.py:name"
    package = re.split(r"[.:]", import_path)[0]
    if package not in sys.modules and PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
        return f"cannot be imported: there is no module {package}, neither installed nor in {os.getcwd()}"
    return ""


def _unfit_file(file: Path, attribute: str) -> str:
    if not file.is_file():
        return f"names a file that is not there (looked for {file.absolute()})"
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return f"cannot be imported: {file}{line}: {error.msg if isinstance(error, SyntaxError) else error}"
    names = {name for node in ast.walk(tree) for name in _defined(node)}
    if attribute in names or "*" in names:
        return ""
    return f"names {attribute!r}, which {file} does not define.{did_you_mean(attribute, names)}"


def _defined(node: ast.AST) -> list[str]:
    """The names that a statement gives; "*" for those that cannot be seen."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return []


def _load_module(name: str, import_path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        what = error if isinstance(error, ImportError) else error_with_place(error)
        raise ImportPathError(f"{import_path!r}: cannot import {name}: {what}") from error


def _load_file(file: Path, import_path: str) -> ModuleType:
    name = f"ductile_import.{file.resolve()}"  # one module a file, and no package's name
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportPathError(f"{import_path!r}: there is no file {file}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ImportPathError(
            f"{import_path!r}: {file} fails when it is imported: {error_with_place(error)}"
        ) from error
    return module
