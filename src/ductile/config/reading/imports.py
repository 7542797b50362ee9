"""Code that a config names: `package.module.attribute`, or `file.py:attribute`.

Packages are found in the folder where the command was started, too, and what a file imports beside the file, and there
last of all: a file that happens to lie in it never takes the place of a library.
"""

import ast
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from hashlib import blake2b
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
    for folder in _searched(source):
        if folder not in sys.path:
            sys.path.append(folder)
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


def unfit(import_path: str, before: Sequence[str] = ()) -> str:
    """What keeps `import_path` from being imported, as far as can be seen without running it; "" when nothing does.

    A file is parsed, and should define the name somewhere. Of a package only the outermost is looked for.

    before: import paths that are imported before it in the same process.
    """
    if _IN_FILE.fullmatch(import_path):
        file, _, attribute = import_path.rpartition(":")
        sources = [path.rpartition(":")[0] for path in (*before, import_path)]
        libraries = [folder for folder in sys.path if folder not in ("", os.getcwd())]
        path = [*libraries, *(folder for source in sources for folder in _searched(source))]
        return _unfit_file(Path(file), attribute) or _mistaken(Path(file), path)
    if import_path.endswith(".py"):
        return f"names a file and nothing in it: write {import_path}:name"
    if _DOTTED.fullmatch(import_path) is None:
        return "is not an import path: write package.module.name or file.py:name"
    package = re.split(r"[.:]", import_path)[0]
    if package not in sys.modules and PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
        return f"cannot be imported: there is no module {package}, neither installed nor in {os.getcwd()}"
    return ""


def _searched(source: str) -> list[str]:
    """Folders in which the imports of `source` are found, after those of the libraries."""
    if not source.endswith(".py"):
        return [os.getcwd()]
    file = Path(source).resolve()
    return list(dict.fromkeys((str(file.parent), str(_package(file)[0]), os.getcwd())))


def _package(file: Path) -> tuple[Path, str]:
    """The folder that the file's outermost package lies in, and the file's name as a module there."""
    folder, name = file.parent, file.stem
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder, name = folder.parent, f"{folder.name}.{name}"
    return folder, name


def _mistaken(file: Path, path: Sequence[str]) -> str:
    """Says so where an import of the file would not find the module that lies beside it; else ""."""
    for name, beside in _imported_beside(file.resolve()).items():
        loaded = sys.modules.get(name)
        spec = loaded.__spec__ if loaded else PathFinder.find_spec(name, path)
        found = spec.origin if spec else None
        if found and os.path.realpath(found) != str(beside):
            return f"imports {name}, and would get {found} instead of {beside}: give that another name"
    return ""


def _imported_beside(file: Path) -> dict[str, Path]:
    """The modules that a file imports, itself or by way of another of them, and that lie beside it. Names that the
    standard library has are not among them."""
    found: dict[str, Path] = {}
    to_read = [file]
    while to_read:
        try:
            tree = ast.parse(to_read.pop().read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # told by who imports it
        for name in {name.partition(".")[0] for node in ast.walk(tree) for name in _imports(node)}:
            places = (file.with_name(f"{name}.py"), file.parent / name / "__init__.py")
            place = next((place for place in places if place.is_file()), None)
            if place is not None and name not in found and name not in sys.stdlib_module_names:
                found[name] = place.resolve()
                to_read.append(place)
    return found


def _imports(node: ast.AST) -> list[str]:
    """Modules that a statement imports by their whole names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


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
    if not file.is_file():
        raise ImportPathError(f"{import_path!r}: there is no file {file}")
    if mistaken := _mistaken(file, sys.path):
        raise ImportPathError(f"{import_path!r}: {file} {mistaken}")
    name = _module_name(file)
    try:
        if name not in sys.modules:
            sys.modules[name] = _executed(file, name)
    except Exception as error:
        raise ImportPathError(
            f"{import_path!r}: {file} fails when it is imported: {error_with_place(error)}"
        ) from error
    return sys.modules[name]


def _module_name(file: Path) -> str:
    """Return the name of the file's module, by which `pickle` finds its functions and classes again: the one that an
    import has, in a process of the user's own, too, unless that is another module's. One module a file."""
    file, name = file.resolve(), file.stem
    own = f"ductile_import_{name.replace('.', '_')}_{blake2b(bytes(file), digest_size=8).hexdigest()}"
    if own in sys.modules or "." in name or name in sys.stdlib_module_names:
        return own
    importlib.invalidate_caches()  # the file may have been written just now
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded else PathFinder.find_spec(name)
    return name if spec and spec.origin and os.path.realpath(spec.origin) == str(file) else own


def _executed(file: Path, name: str) -> ModuleType:
    """The file as a module: of its package where it imports from that with a dot, else one of its own."""
    _, in_package = _package(file.resolve())
    if _has_relative_imports(file):
        if "." not in in_package:
            raise ImportError("it imports with a dot and is in no package. Without the dot it finds the file beside it")
        module = importlib.import_module(in_package)
        if module.__file__ is None or Path(module.__file__).resolve() != file.resolve():
            raise ImportError(f"{in_package} is {module.__file__}, another file")
        return module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _has_relative_imports(file: Path) -> bool:
    return any(
        isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(ast.parse(file.read_bytes(), str(file)))
    )
