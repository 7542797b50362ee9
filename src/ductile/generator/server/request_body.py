"""Turns the bytes of a body into a request, or into a sentence that names the field, its value and what it must be."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from ductile.config.reading.errors import show
from ductile.generator.server.openai_api import Body

B = TypeVar("B", bound=Body)

MAX_CONTAINERS = 2**16
"""Most lists and objects in a body. Each empty one takes two bytes there and eighty in memory."""

_NO_MARKS = bytes(set(range(256)) - set(b'"[{'))


class BadBody(Exception):
    """A body is not what the API asks for. The text is for the client; `param` is the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def read_body(kind: type[B], raw: bytes | bytearray) -> B:
    """Raises `BadBody`."""
    if _num_containers(raw) > MAX_CONTAINERS:
        raise BadBody(f"the body has more than {MAX_CONTAINERS} lists and objects")
    try:
        # Of all parsers at hand this one refuses what cannot be written as UTF-8 again, and nests to a limit.
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as problem:
        raise BadBody(f"the body is not JSON: {problem}") from None
    if not isinstance(data, dict):
        raise BadBody(f"the body is {show(data)}; it must be a JSON object with the request's fields")
    try:
        return kind.model_validate(data)
    except ValidationError as problem:
        raise _bad_field(problem.errors(include_url=False)[0]) from None


def _num_containers(raw: bytes | bytearray) -> int:
    """Return an upper bound, which is exact when it is large: brackets in strings do not count.

    A few passes over the body, whatever it holds: a regular expression for strings would begin anew at each quote of
    one that never ends.
    """
    bound = raw.count(b"[") + raw.count(b"{")
    if bound <= MAX_CONTAINERS:
        return bound
    marks = raw.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_MARKS)
    bare = b"".join(marks.replace(b'""', b"").split(b'"')[::2])
    return bare.count(b"[") + bare.count(b"{")


def _bad_field(problem: ErrorDetails) -> BadBody:
    param = ".".join(map(str, problem["loc"]))
    match problem["type"]:
        case "missing":
            return BadBody(f"{param} is missing", param)
        case "unknown_field":
            name, near = problem["ctx"]["name"], problem["ctx"]["near"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
            param = ".".join(map(str, (*problem["loc"], name)))
            return BadBody(f"{param} is not a field of this request.{near}", param)
        case "value_error":  # our own, which says it all
            return BadBody(problem["msg"].removeprefix("Value error, "), param or None)
    rule = _rule(problem["type"], problem.get("ctx", {})) or problem["msg"]
    return BadBody(f"{param} is {show(problem['input'])}; it must be {rule}", param)


def _rule(type: str, context: Mapping[str, Any]) -> str:
    """Return the rule that pydantic applies, in our words; empty for what no field here asks."""
    rules = {
        "bool_type": "true or false",
        "dict_type": "an object",
        "finite_number": "a finite number",
        "float_type": "a number",
        "int_type": "a whole number",
        "list_type": "a list",
        "model_type": "an object",
        "string_type": "a text",
        "greater_than_equal": "{ge} or more",
        "less_than": "less than {lt}",
        "less_than_equal": "{le} or less",
        "literal_error": "{expected}",
        "too_long": "a list of at most {max_length}",
        "too_short": "a list of at least {min_length}",
    }
    return rules.get(type, "").format(**context).replace("'", '"')  # pydantic quotes as Python does
