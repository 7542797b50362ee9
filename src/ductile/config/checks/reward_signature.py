"""How a reward function wants to be called, read off its parameters.

    def reward(row, completion)                              the line of the file, the policy's last words
    def reward(row, completion, num_tokens, finish_reason)   and any of FACTS, by name
    def reward(completions, solution, **kwargs)              TRL's: lists, and the line's values by name

A task's method is called with the example's number in the row's place. All of them may be `async`.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ductile.config.reading.errors import listed

FACTS = ("num_tokens", "finish_reason", "num_turns", "token_ids", "opened")
"""What a reward may ask for besides the text (`ductile.records.Completion`)."""
OF_TRL = ("completions", "completion_ids")
"""A function with one of these parameters is called as TRL calls it."""
IS_A_CLASS = "is a class; a reward is a function, called with (row, completion)"
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class WrongSignature(Exception):
    """A function cannot be called as a reward. The text goes on after the function's name: "takes no ..."."""


@dataclass(frozen=True, slots=True)
class RewardSignature:
    style: Literal["row", "lists"]
    by_name: frozenset[str] = frozenset()
    """Names of the arguments that the function is given by name; with `takes_all` it gets every one that there is."""
    takes_all: bool = False
    required: frozenset[str] = frozenset()
    """Names in `by_name` without a default."""

    def wants(self, name: str) -> bool:
        return self.takes_all or name in self.by_name

    @property
    def wants_token_ids(self) -> bool:
        return self.wants("token_ids" if self.style == "row" else "completion_ids")


def reward_signature(function: Callable[..., Any], first: str = "row") -> RewardSignature:
    """first: what the function is about, in words. Raises WrongSignature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return RewardSignature("row")  # written in C: it tells nothing of itself
    return _signature(parameters, first)


def _signature(parameters: Mapping[str, inspect.Parameter], first: str) -> RewardSignature:
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    names = [name for name, parameter in parameters.items() if parameter.kind in _BY_NAME]
    if not set(OF_TRL).isdisjoint(names):
        required = {name for name in names if parameters[name].default is inspect.Parameter.empty}
        return RewardSignature("lists", frozenset(names), takes_all, frozenset(required))
    positional = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(positional) < 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise WrongSignature(
            f"takes ({', '.join(map(str, parameters.values()))}); it is called with ({first}, completion), or with "
            "lists by name when it asks for `completions`"
        )
    others = frozenset(names) - set(positional[:2])
    for name in sorted(others - set(FACTS)):
        if parameters[name].default is inspect.Parameter.empty:
            facts = listed([f"`{fact}`" for fact in FACTS])
            raise WrongSignature(
                f"asks for `{name}`; besides ({first}, completion) there are {facts}, or give it a default"
            )
    return RewardSignature("row", others & set(FACTS), takes_all)


def uncallable(import_path: str) -> str:
    """Why the function that `file.py:name` defines cannot be a reward, as far as its head tells; "" when it can.

    The file is parsed and not run; what a decorator makes of a function is not seen.
    """
    node = _definition(import_path)
    if node is None:
        return ""  # told by who looks for it
    place = f"({Path(import_path.rpartition(':')[0]).name}:{node.lineno})"
    if isinstance(node, ast.ClassDef):
        return f"{IS_A_CLASS} {place}"
    try:
        _signature_in(node)
    except WrongSignature as error:
        return f"{error} {place}"
    return ""


def columns_of(import_path: str) -> frozenset[str]:
    """What the function that `file.py:name` defines must be given by name, as far as its head tells. The file is not
    run."""
    node = _definition(import_path)
    try:
        return frozenset() if node is None or isinstance(node, ast.ClassDef) else _signature_in(node).required
    except WrongSignature:
        return frozenset()


def _definition(import_path: str) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None:
    file, _, name = import_path.rpartition(":")
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    return None


def _signature_in(node: ast.FunctionDef | ast.AsyncFunctionDef) -> RewardSignature:
    if node.decorator_list:
        return RewardSignature("row")  # a decorator may make anything of the function
    return _signature({parameter.name: parameter for parameter in _parameters(node)}, "row")


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[inspect.Parameter]:
    args, kind = node.args, inspect.Parameter
    positional = [(arg, kind.POSITIONAL_ONLY) for arg in args.posonlyargs]
    positional += [(arg, kind.POSITIONAL_OR_KEYWORD) for arg in args.args]
    num_required = len(positional) - len(args.defaults)
    for place, (arg, how) in enumerate(positional):
        yield kind(arg.arg, how, default=kind.empty if place < num_required else None)
    if args.vararg:
        yield kind(args.vararg.arg, kind.VAR_POSITIONAL)
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield kind(arg.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None)
    if args.kwarg:
        yield kind(args.kwarg.arg, kind.VAR_KEYWORD)
