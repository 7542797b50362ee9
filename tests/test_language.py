"""One public class name is one class, no class, function, field or parameter has a retired name, and docstrings stand
alone: a reader sees one without its neighbours."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import ductile

SOURCE = Path(ductile.__file__).parent
RETIRED = {
    "answer": "completion, or reply of a process, or response of a server",
    "question": "prompt, or request",
    "lesson": "sample, or sample builder",
    "divisor": "loss denominator",
    "tally": "step metrics",
    "hand": "samples in flight",
    "handing_over": "samples in flight",
    "hopeless": "stale",
    "give_up": "drop",
    "give_back": "requeue, or trim of memory",
    "teaches": "has an advantage",
    "learned": "trained",
    "standing": "trainer instance",
    "hold": "assign a role, drain a worker, touch a block, pause training",
    "settle": "finalize a resize, begin a step, catch up",
    "conductor": "elastic controller",
    "complain": "print an error",
    "complaints": "violations",
    "remarks": "warnings",
    "way": "role delta",
    "flight": "request in flight",
    "take_off": "dispatch",
    "landing": "migration of a request, or a slab that has been read",
    "traveller": "migrating request",
    "handover": "migration",
    "hand_off": "migrate out",
    "shelf": "KV transfer buffer",
    "roster": "worker pool",
    "lender": "weight offers",
    "lend": "offer",
    "take_back": "end an offer",
    "pace": "step profiler",
    "story": "run report",
    "told": "error text, or report",
    "happening": "report event",
    "news": "change signal",
    "together": "gather, merge, collocate",
    "unless": "cancel on",
    "gathering": "barrier",
    "cargo": "prepared transfer",
    "trip": "prepared transfer",
    "insisted": "forced stop",
    "picture": "status table",
    "closing": "final summary",
    "circle": "loop",
    "life": "run context",
    "formation": "parallel layout",
    "ranks": "parallel context",
    "replicas": "dp_replicate",
    "normalise": "loss aggregation",
    "grant": "assign a role",
    "handoff": "migration",
    "carriage": "context transfer",
    "terms": "options",
    "flying": "in flight",
}
"""Names of ours that are retired, and what the field says. None of them is a word of the field in the place that it
had."""
FRAGMENT = re.compile(
    r"\s*(That|Of|By|In|For|As|With|From|And|Before|During|Until|While|Once|(Where|When|After)\b(?![^.]*\?))\b"
)
"""How a text begins that goes on with another one, such as "Of one slot alone." after a name; questions stand alone."""


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
        self.corner = 3
        """Where it begins."""
        self.end = 4
        """Where does it end?"""
'''
    assert list(fragments(source)) == [
        (3, "Of one slot."),
        (12, "From above, in pixels."),
        (19, "And depth."),
        (23, "Where it begins."),
    ]


def test_one_public_class_name_is_one_class() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for file in sorted(SOURCE.rglob("*.py")):
        for name in public_types(file.read_text(encoding="utf-8")):
            homes[name].append(str(file.relative_to(SOURCE.parents[1])))
    assert homes["Loop"] == ["src/ductile/orchestrator/loop/loop.py"], "the walk finds classes"
    found = [f"{name}: {', '.join(files)}" for name, files in sorted(homes.items()) if len(files) > 1]
    advice = "keep the name for the class that it fits best, and call the others what they are"
    assert not found, "\n".join([f"{len(found)} names are defined more than once; {advice}", *found])


def test_no_name_is_retired() -> None:
    found = [
        f"{file.relative_to(SOURCE.parents[1])}:{line}: {name}: say {RETIRED[word]}"
        for file in sorted(SOURCE.rglob("*.py"))
        for line, name in names(file.read_text(encoding="utf-8"))
        for word in (words_of(name), words_of(name).removesuffix("s"))
        if word in RETIRED
    ]
    assert not found, "\n".join(found)


def test_names_of_classes_functions_parameters_and_fields_are_found() -> None:
    source = """
LIMIT: int = 3

class Lessons(Base):
    divisor: int
    def handOff(self, tally, *rest, hand=None, **more):
        self._story = 1
        local = other.roster = self.left[0] = 2
        for each in rest: pass

Phase = Literal["hold", "move"]
"""
    found = {name for _, name in names(source)}
    parameters = {"self", "tally", "rest", "hand", "more"}
    fields = {"LIMIT", "Lessons", "divisor", "handOff", "_story", "roster"}
    assert found == fields | {"local", "each", "Phase", "hold", "move"} | parameters
    words = {"Lessons": "lessons", "_hand_off": "hand_off", "handOff": "hand_off", "KVShelf": "kv_shelf"}
    assert {name: words_of(name) for name in words} == words


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
    aliases = "Row = tuple[int]\nPair = tuple[int, int]\nLIMIT = 3\n_Own = int\nlocal = 4\n"
    assert list(public_types(aliases + source)) == [*public_classes(source), "Pair"]


def names(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each class, function, parameter, field and variable, and of each text that is a member of a
    Literal."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.Subscript(value=ast.Name(id="Literal")):
                for member in ast.walk(node.slice):
                    if isinstance(member, ast.Constant) and isinstance(member.value, str):
                        yield member.lineno, member.value
            case _:
                pass


def words_of(name: str) -> str:
    """`_HandOff` and `_hand_off` as "hand_off"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.strip("_")).lower()


def public_types(source: str) -> Iterator[str]:
    """`public_classes`, and the aliases of types in a module but for `Row`, which is each table's own."""
    yield from public_classes(source)
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]) if name[0].isupper() and not name.isupper() and name != "Row":
                yield name
            case _:
                pass


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
