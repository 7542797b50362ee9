"""No scorer of the installed reasoning-gym runs what a policy wrote."""

import ast
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from ductile.config.schema.orchestrator import ReasoningGymTask
from ductile.tasks.build import build_task
from ductile.tasks.strict_text import DISARMED, read_formula, read_literal

RUNS_TEXT = {
    "eval", "exec", "compile", "parse_expr", "sympify", "S", "parse_latex", "lambdify", "__import__",
    "run", "Popen", "system", "check_output", "import_module", "run_path", "Rational", "Poly", "Eq",
}  # fmt: skip
OWN_TEXT = {
    "arithmetic.bitwise_arithmetic": "evaluates the question, which it wrote itself",
    "logic.propositional_logic": "its parse_expr is a parser of its own",
}
DATASETS_OF = {
    "binary_matrix", "spiral_matrix", "n_queens", "string_insertion", "number_sorting", "countdown", "puzzle24",
    "simple_integration", "intermediate_integration", "polynomial_multiplication",
}  # fmt: skip


def reached(module):
    """Names that `score_answer` calls, also through functions and methods of the same module."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    functions = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
    todo, seen, calls = ["score_answer"], set(), set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for function in functions.get(name, []):
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                called = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
                calls.add(called)
                todo.append(called)
    return calls


def test_every_scorer_that_runs_text_is_disarmed():
    found = set()
    for info in pkgutil.walk_packages(reasoning_gym.__path__, "reasoning_gym."):
        if ".contrib" in info.name:
            continue
        module = importlib.import_module(info.name)
        if reached(module) & RUNS_TEXT:
            found.add(info.name.removeprefix("reasoning_gym."))
    assert found - OWN_TEXT.keys() == DISARMED.keys()
    scorers = {DATASETS[name][0].__module__.removeprefix("reasoning_gym.") for name in DATASETS_OF}
    assert scorers == DISARMED.keys()


@pytest.mark.parametrize("name", sorted(DATASETS_OF))
def test_a_completion_starts_nothing_and_right_ones_still_score(name, tmp_path):
    task = build_task(ReasoningGymTask(name=name, size=20))
    trap = tmp_path / "pwned"
    for attack in (
        f"__import__('os').system('touch {trap}')",
        f"[__import__('pathlib').Path('{trap}').touch()]",
        f"(lambda: open('{trap}', 'w'))()",
        f"sin(__import__('os').system('touch {trap}'))",
    ):
        task.reward(0, f"<answer>{attack}</answer>")
    assert not trap.exists()
    for example in range(20):
        right = task._dataset[example]["answer"]
        if right is not None and name != "puzzle24":
            assert task.reward(example, f"<answer>{right}</answer>") == 1, (example, right)


def test_what_the_scorers_read_besides_the_exact_answer():
    matrix = build_task(ReasoningGymTask(name="spiral_matrix", size=1))
    right = matrix._dataset[0]["answer"].split()
    assert matrix.reward(0, f"<answer>{[int(number) for number in right]}</answer>") == 0.1
    countdown = build_task(ReasoningGymTask(name="countdown", size=1))
    formula = countdown._dataset[0]["answer"]
    assert countdown.reward(0, f"<answer> ({formula}) </answer>") == 1
    twenty_four = build_task(ReasoningGymTask(name="puzzle24", size=1))
    assert twenty_four.reward(0, "<answer>(3 + 3 + 3*6)</answer>") == 1
    assert twenty_four.reward(0, "<answer>(3 + 3 + 3*5)</answer>") == 0.01


FORMULAS = ["2*x + 3", "-x**2/2 + C", "sin(x)*exp(-2*x)", "x*log(x) - x", "(1 + sqrt(5))/2", "pi*E**x", "1.5*x", "7//2"]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_is_what_sympy_reads(text):
    import sympy

    x = sympy.Symbol("x")
    assert read_formula(text, {"x": x}) == sympy.parse_expr(text, {"x": x})


@pytest.mark.parametrize(
    "text",
    ["x.__class__", "open('f')", "9**9**9**9", "[1]", "'a'", "lambda: 1", "x if x else y", "sin(*[1])", "f(x)", "1+"],
)
def test_what_is_no_formula_is_refused(text):
    with pytest.raises((ValueError, SyntaxError)):
        read_formula(text)


ENDLESS = [
    "((9**999)**999)**99", "(x*9**999)**999", "(((2**(1/3))**999)**999)**999", "factorial(10**7)", "gamma(10**8)",
    "factorial(factorial(12))", "exp(exp(exp(100)))", "9**9**9", "((x + 1)**1000) % ((x + 2)**999)",
    "sin(x)+" * 1500 + "1",
]  # fmt: skip


@pytest.mark.parametrize("text", ENDLESS)
def test_what_would_keep_the_scorer_busy_is_refused_at_once(text):
    with pytest.raises(ValueError, match=r"above 1000|more than 10000 bits|for numbers|characters"):
        read_formula(text)


@pytest.mark.parametrize("name", ["countdown", "puzzle24", "simple_integration", "polynomial_multiplication"])
def test_an_endless_completion_scores_as_a_wrong_one(name):
    task = build_task(ReasoningGymTask(name=name, size=1))
    wrong = task.reward(0, "<answer>no idea</answer>")
    assert [task.reward(0, f"<answer>{text}</answer>") for text in ENDLESS] == [wrong] * len(ENDLESS)


@pytest.mark.parametrize("text", ["1000**1000", "factorial(1000)", "gamma(999.5)", "(1/3)**999", "2**-1000", "x**1000"])
def test_long_numbers_within_the_bounds_are_read(text):
    import sympy

    assert read_formula(text) == sympy.parse_expr(text)


@pytest.mark.parametrize("text", ["f()", "__import__('os')", "[x for x in 'ab']", "1 +", "'a' * 10**9"])
def test_what_is_no_literal_is_refused(text):
    with pytest.raises((ValueError, SyntaxError)):
        read_literal(text)


def test_the_readers_stay_in_place():
    build_task(ReasoningGymTask(name="countdown", size=1))
    assert sys.modules["reasoning_gym.games.countdown"].parse_expr is read_formula
