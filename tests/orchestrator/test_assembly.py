import ast
from pathlib import Path

from ductile import orchestrator

MOST = 9


def test_no_constructor_takes_more_than_nine_arguments():
    """Callers put the loop together in several places: what takes more is more than one thing."""
    found = {
        f"{file.name}: {owner.name}": num
        for file in Path(orchestrator.__file__).parent.rglob("*.py")
        for owner in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(owner, ast.ClassDef)
        for num in (num_arguments(owner),)
        if num
    }
    assert found["loop.py: Loop"] <= MOST
    assert found["buffer.py: Buffer"] == 7, "arguments by name count, too"
    assert {name: num for name, num in found.items() if num > MOST} == {}


def num_arguments(owner: ast.ClassDef) -> int:
    """Arguments of the class's constructor; those of a dataclass are its fields."""
    for each in owner.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return len([*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs]) - 1
    if any("dataclass" in ast.unparse(decorator) for decorator in owner.decorator_list):
        fields = [each for each in owner.body if isinstance(each, ast.AnnAssign)]
        return len([each for each in fields if not ast.unparse(each.annotation).startswith("ClassVar")])
    return 0
