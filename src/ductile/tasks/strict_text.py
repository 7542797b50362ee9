"""What a policy wrote, read as data: literals and formulas, by walking a syntax tree, without running any of it.

reasoning-gym's scorers hand a policy's completion to Python's `eval`, or to sympy's `parse_expr`, which is `eval` with
more names in it: a completion could start a program. `disarm` puts these readers in their place, in the modules that do
so.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

MAX_CHARS = 100_000
MAX_FORMULA_CHARS = 10_000
MAX_EXPONENT = 1000
"""Largest exponent in a formula: `9**9**9` is short to write and does not end."""
MAX_BITS = 10_000
"""Largest size of a number, in bits; `1000**1000` is within."""

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_TRIGONOMETRIC = {
    f"{inverse}{name}{hyperbolic}"
    for name in ("sin", "cos", "tan", "cot", "sec", "csc")
    for inverse in ("", "a")
    for hyperbolic in ("", "h")
}
_OTHER = {"exp", "log", "ln", "sqrt", "cbrt", "Abs", "sign", "erf", "gamma", "factorial", "Integral"}
FUNCTIONS = frozenset(_TRIGONOMETRIC | _OTHER)
GROWING = frozenset(["exp", "gamma", "factorial", "sinh", "cosh"])
"""Functions whose values are far longer to write than their arguments, which MAX_EXPONENT bounds therefore."""
CONSTANTS = frozenset({"pi", "E", "I"})


def read_literal(text: str) -> Any:
    """`[[0, 1], [1, 0]]`: in the place of `eval`. Raises ValueError or SyntaxError for all that is not a literal."""
    return ast.literal_eval(_bounded(text))


def read_formula(text: str, local_dict: Mapping[str, Any] | None = None, **_: Any) -> Any:
    """`2*x + sin(x)` as a sympy expression: in the place of `parse_expr`, with its first two arguments.

    Numbers, names, arithmetic and the functions of FUNCTIONS. Raises ValueError or SyntaxError for all else, and for
    numbers that are too long to compute with: a completion must not be able to keep its scorer from ending.
    """
    return _value(ast.parse(_bounded(text, MAX_FORMULA_CHARS).strip(), mode="eval").body, local_dict or {})


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    import sympy

    match node:
        case ast.Constant(value=bool() | complex() | str() | bytes()):
            pass
        case ast.Constant(value=int() | float() as number):
            return sympy.sympify(number)
        case ast.Name(id=name):
            return names[name] if name in names else getattr(sympy, name) if name in CONSTANTS else sympy.Symbol(name)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            base, other = _value(left, names), _value(right, names)
            if isinstance(op, ast.Pow):
                _refuse_large(other, "an exponent")
                if other.is_number and _num_bits(base) * abs(other) > MAX_BITS:
                    raise ValueError(f"a number of more than {MAX_BITS} bits")
            if isinstance(op, ast.FloorDiv | ast.Mod) and not (base.is_number and other.is_number):
                raise ValueError("// and % are for numbers")  # of polynomials, sympy looks for common divisors
            return _not_long(_OPERATORS[type(op)](base, other))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS and len(args) in (1, 2):
            values = [_value(arg, names) for arg in args]
            for value in values if name in GROWING else []:
                _refuse_large(value, f"an argument of {name}")
            return _not_long(getattr(sympy, name)(*values))
        case _:
            pass
    raise ValueError(f"{ast.unparse(node)[:80]} is no part of a formula")


def _refuse_large(value: Any, what: str) -> None:
    if value.is_number and not abs(value) <= MAX_EXPONENT:
        raise ValueError(f"{what} above {MAX_EXPONENT}")


def _not_long(value: Any) -> Any:
    if _num_bits(value) > MAX_BITS:
        raise ValueError(f"a number of more than {MAX_BITS} bits")
    return value


def _num_bits(value: Any) -> int:
    """Bits of the rational number that the value is, or is a multiple of: its numerator's or denominator's; else 0."""
    factor, _ = value.as_coeff_Mul()
    return max(int(factor.p).bit_length(), int(factor.q).bit_length()) if factor.is_Rational else 0


def _bounded(text: str, max_chars: int = MAX_CHARS) -> str:
    if len(text) > max_chars:
        raise ValueError(f"a text of {len(text)} characters")
    return text


class StrictSympy(ModuleType):
    """sympy, but for what reads text."""

    parse_expr = staticmethod(read_formula)

    def __init__(self) -> None:
        super().__init__("sympy")

    def __getattr__(self, name: str) -> Any:
        import sympy

        return getattr(sympy, name)


DISARMED: dict[str, dict[str, Callable[[], Any]]] = {
    "algebra.intermediate_integration": {"sympy": StrictSympy},
    "algebra.polynomial_multiplication": {"sp": StrictSympy},
    "algebra.simple_integration": {"sympy": StrictSympy},
    "algorithmic.binary_matrix": {"eval": lambda: read_literal},
    "algorithmic.number_sorting": {"eval": lambda: read_literal},
    "algorithmic.spiral_matrix": {"eval": lambda: read_literal},
    "algorithmic.string_insertion": {"eval": lambda: read_literal},
    "games.countdown": {"parse_expr": lambda: read_formula},
    "games.n_queens": {"eval": lambda: read_literal},
    "games.puzzle24": {"parse_expr": lambda: read_formula},
}
"""Modules of reasoning-gym, with the names in each that a reader of this file replaces. A test walks through the
installed version and finds every scorer that needs an entry."""


def disarm(modules: Mapping[str, ModuleType]) -> None:
    """Make those of the imported `modules` that DISARMED lists read text as data. May be called again."""
    for name, readers in DISARMED.items():
        module = modules.get(f"reasoning_gym.{name}")
        for attribute, reader in readers.items() if module else ():
            setattr(module, attribute, reader())
