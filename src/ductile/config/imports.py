"""Code that a config names: `package.module.attribute`, or `file.py:attribute`.

Packages are found in the folder where the command was started, too, as they are by `python -m`.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class ImportPathError(Exception):
    """The text is a sentence that names the path and what is wrong with it."""


def import_object(import_path: str) -> Any:
    """What `import_path` names.

    Raises ImportPathError when the module or file cannot be imported, or has no such attribute.
    """
    separator = ":" if ":" in import_path else "."
    source, _, attribute = import_path.rpartition(separator)
    if not source or not attribute:
        raise ImportPathError(f"{import_path!r} is no import path; write package.module.name or file.py:name")
    module = _load_file(Path(source), import_path) if source.endswith(".py") else _load_module(source, import_path)
    if attribute not in vars(module):
        raise ImportPathError(f"{import_path!r}: {source} has no {attribute!r}")
    return vars(module)[attribute]


def _load_module(name: str, import_path: str) -> ModuleType:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ImportPathError(f"{import_path!r}: cannot import {name}: {error}") from error


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
        raise ImportPathError(f"{import_path!r}: {file} fails when it is imported: {error!r}") from error
    return module
