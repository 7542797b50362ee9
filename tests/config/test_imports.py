import subprocess
import sys

import pytest

from ductile.config.reading.imports import ImportPathError, import_object, unfit


def test_a_module_beside_the_command_is_found_as_the_cli_starts_it(tmp_path):
    (tmp_path / "beside_me.py").write_text("VALUE = 42\n")
    # The console script does not put the working directory on the path; neither does `python file.py`.
    (tmp_path / "sub").mkdir()
    script = tmp_path / "sub" / "script.py"
    script.write_text(
        "from ductile.config.reading.imports import import_object; print(import_object('beside_me.VALUE'))"
    )
    result = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "42", result.stderr


def test_a_file_is_loaded_once_and_may_define_dataclasses(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Point:\n    x: int = 3\ncalls = []\n"
    )
    path = f"{tmp_path}/mine.py"
    assert import_object(f"{path}:Point")().x == 3
    assert import_object(f"{path}:calls") is import_object(f"{path}:calls")


POOLED = """
import multiprocessing, pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
@dataclass
class Verdict:
    value: int
def graded(text):
    return Verdict(len(text))
def pickled(text):
    return pickle.loads(pickle.dumps(graded(text)))
def pooled(text, start="fork"):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(start)) as pool:
        return pool.submit(graded, text).result(30)
"""


@pytest.mark.parametrize("name", ["pooled_reward", "pooled.reward", "pooled-reward", "json"])
def test_what_a_file_defines_is_found_by_its_own_processes(name, tmp_path):
    (tmp_path / f"{name}.py").write_text(POOLED)
    path = f"{tmp_path}/{name}.py"
    ways = {each: import_object(f"{path}:{each}") for each in ("pickled", "pooled")}
    verdict = import_object(f"{path}:Verdict")
    assert [way("four") for way in ways.values()] == [verdict(4)] * 2
    if name.startswith("pooled") and "." not in name:  # the name that an import of the file has
        assert ways["pooled"]("four", "spawn") == verdict(4)


def test_a_file_that_fails_is_tried_again(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("raise RuntimeError('not yet')")
    with pytest.raises(ImportPathError, match="fails when it is imported: RuntimeError"):
        import_object(f"{file}:x")
    file.write_text("x = 0\nclass Broken\n")
    with pytest.raises(ImportPathError, match=r"SyntaxError: expected ':' \(mine.py:2\)"):
        import_object(f"{file}:x")
    file.write_text("x = 1  # now")
    assert import_object(f"{file}:x") == 1


UNFIT = [
    ("mine.py:reward", ""),
    ("mine.py:helper", ""),
    ("mine.py:rewards", "names 'rewards', which mine.py does not define. Did you mean reward?"),
    ("broken.py:reward", "cannot be imported: broken.py, line 1: "),
    ("gone.py:reward", "names a file that is not there (looked for "),
    ("json.dumps", ""),
    ("beside.anything", ""),
    ("no_such_package.thing", "cannot be imported: there is no module no_such_package"),
    ("reward", "is not an import path: write package.module.name or file.py:name"),
]


@pytest.mark.parametrize(("path", "said"), UNFIT)
def test_what_cannot_be_imported_is_found_without_running_it(path, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit\nfrom os import path as helper\ndef reward(): ...\n")
    (tmp_path / "broken.py").write_text("def reward(:\n")
    (tmp_path / "beside.py").write_text("raise SystemExit\n")
    found = unfit(path)
    assert found.startswith(said) if said else found == ""


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two folders with files of the same names, and neither is the current one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helpers.py").write_text(f"def who():\n    return {name!r}\n")
        (tmp_path / name / "reward.py").write_text("from helpers import who\n")
        (tmp_path / name / "alone.py").write_text(f"def who():\n    return {name!r}\n")
        (tmp_path / name / "late.py").write_text("def who():\n    from helpers import who\n    return who()\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("file", ["reward", "late"])
def test_a_file_finds_the_file_beside_it(folders, file):
    assert unfit(f"../one/{file}.py:who") == ""
    assert import_object(f"../one/{file}.py:who")() == "one"


def test_two_files_of_one_name_are_two(folders):
    assert [import_object(f"../{name}/alone.py:who")() for name in ("one", "two")] == ["one", "two"]


@pytest.mark.parametrize("file", ["reward", "late"])
def test_of_two_modules_of_one_name_none_stands_for_the_other(folders, file):
    said = f"imports helpers, and would get {folders}/one/helpers.py instead of {folders}/two/helpers.py"
    assert said in unfit(f"../two/{file}.py:who", before=["../one/reward.py:who"])
    assert import_object("../one/reward.py:who")() == "one"
    with pytest.raises(ImportPathError, match=said):
        import_object(f"../two/{file}.py:who")


def test_a_library_is_not_replaced_by_a_file_beside(folders):
    (folders / "one/json.py").write_text("raise SystemExit\n")
    (folders / "one/reads.py").write_text("import json\nwho = json.dumps\n")
    assert import_object("../one/reads.py:who") is __import__("json").dumps
    (folders / "one/pytest.py").write_text("raise SystemExit\n")
    (folders / "one/tests_it.py").write_text("import pytest\n")
    assert "imports pytest, and would get " in unfit("../one/tests_it.py:pytest")


def test_a_file_of_a_package_imports_from_its_package(folders):
    (folders / "one/kit").mkdir()
    (folders / "one/kit/__init__.py").write_text("")
    (folders / "one/kit/tools.py").write_text("def who():\n    return 'tools'\n")
    (folders / "one/kit/dotted.py").write_text("from .tools import who\n")
    (folders / "one/kit/whole.py").write_text("from kit.tools import who\n")
    for file in ("dotted", "whole"):
        assert import_object(f"../one/kit/{file}.py:who")() == "tools"
    (folders / "one/dotted.py").write_text("from .helpers import who\n")
    with pytest.raises(ImportPathError, match="Without the dot it finds the file beside it"):
        import_object("../one/dotted.py:who")
