"""Tool calls in what a model says: each family writes them in a form of its own, as its chat template shows.

A form is known by a trial: the template renders a call, and the first form that reads the same call out of that text is
the template's. What no form reads stays text.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

Tool = Mapping[str, Any]
"""A tool as the API has it: {"type": "function", "function": {"name": ..., "parameters": {JSON schema}}}."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


Read = Callable[[str, re.Match[str], Sequence[Tool]], tuple[list[ToolCall], int]]
"""Function of a text, where in it calls open, and the tools that there are: the calls, and where the text goes on
behind them. Raises ValueError for what is none."""


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A family's way to write calls."""

    name: str
    opening: re.Pattern[str]
    read: Read
    beginning: re.Pattern[str]
    """Matches where every opening begins, also where the text ends within it: a stream holds back what follows."""
    ending: str
    """Text with which a call is complete; "" where only the end of the text says so."""


def split_calls(form: ToolForm, text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    """Return the text without its calls, and these."""
    content, calls, at = "", list[ToolCall](), 0
    while opening := form.opening.search(text, at):
        found, end = _read(form, text, opening, tools)
        content += text[at : end if found is None else opening.start()]
        calls, at = calls + (found or []), end
    return content + text[at:], calls


def _read(
    form: ToolForm, text: str, opening: re.Match[str], tools: Sequence[Tool]
) -> tuple[list[ToolCall] | None, int]:
    """Return the calls, and where the text goes on; None where the model has begun a call, and wrote something else."""
    try:
        found, end = form.read(text, opening, tools)
        for call in found:
            json.dumps(call.arguments, allow_nan=False)  # as the API has them
    except (ValueError, RecursionError):
        return None, max(opening.end(), opening.start() + 1)
    return found, end


def form_of(render: Callable[..., str]) -> ToolForm | None:
    """Return the form in which a chat template writes calls; None for one that writes none, or in a form that we do not
    know. `render(messages, add_generation_prompt, tools=...)` returns a conversation's text, or raises an Exception."""
    user, tools = {"role": "user", "content": "0"}, [TRIAL_TOOL]
    # Templates want the arguments as an object or in JSON, and some write a call only where there is no content.
    for arguments, content in product((TRIAL.arguments, json.dumps(TRIAL.arguments)), ("", None)):
        call = {"id": "trial0000", "type": "function", "function": {"name": TRIAL.name, "arguments": arguments}}
        try:
            prompt = render([user], True, tools=tools)
            said = render([user, {"role": "assistant", "content": content, "tool_calls": [call]}], False, tools=tools)
        except Exception:  # whatever a template cannot do with a call
            continue
        turn = said[
            next((at for at, both in enumerate(zip(prompt, said, strict=False)) if len({*both}) > 1), len(prompt)) :
        ]
        for form in FORMS:
            if split_calls(form, turn, tools)[1] == [TRIAL]:
                return form
    return None


class CallStream:
    """Tells calls from other text as it comes, thoughts aside: what stands in `<think>` is no call. The pieces in which
    it comes mean nothing. Whitespace before a call, and at the end of a text with calls, is left out."""

    def __init__(self, form: ToolForm, tools: Sequence[Tool], thinking: bool) -> None:
        """thinking: whether the prompt has opened thoughts."""
        self._form, self._tools = form, tools
        self._thinking: bool | None = thinking or None
        """True where it thinks; None before the first word, which may say so."""
        self._held, self._at = "", 0
        """Text that waits from `_at` on; before it is the last character that does not, as a form may ask for the
        turn's beginning."""
        self._space = ""
        """Whitespace between what is shown and what waits."""
        self._called, self._tried = False, 0
        """Return whether there was a call, and how much of what is held has been read in vain."""

    def push(self, text: str, last: bool) -> tuple[str, list[ToolCall]]:
        """Take what the model said, and return what of it may be shown now, and the calls that are complete."""
        self._held += text
        shown, calls = self._thoughts(last), list[ToolCall]()
        if self._thinking is not False:
            return shown, calls
        complete = self._complete(last)
        while last or complete > self._tried:
            opening = self._form.opening.search(self._held[:complete], self._at)
            if opening is None:
                break
            found, end = _read(self._form, self._held[:complete], opening, self._tools)
            if found is None and not last:  # more of it may make it a call
                break
            shown += self._show(end if found is None else opening.start())
            if found is not None:
                self._space, self._called, calls = "", True, calls + found
                self._pass(end - opening.start() + self._at)
            complete = self._complete(last)
        self._tried = complete
        waits = None if last else self._form.beginning.search(self._held, self._at)
        shown += self._show(waits.start() if waits else len(self._held))
        if last and not self._called:
            shown += self._space
        return shown, calls

    def _complete(self, last: bool) -> int:
        """Characters of what is held in which each call is complete."""
        if last:
            return len(self._held)
        end = self._held.rfind(self._form.ending, self._at) if self._form.ending else -1
        return 0 if end < 0 else end + len(self._form.ending)

    def _show(self, end: int) -> str:
        """Return what is held up to `end`, less whitespace that nothing follows yet."""
        said = self._space + self._held[self._at : end]
        shown = said.rstrip()
        self._space = said[len(shown) :]
        self._pass(end)
        return shown

    def _pass(self, end: int) -> None:
        if end > self._at:
            self._held, self._at, self._tried = self._held[end - 1 :], 1, 0

    def _thoughts(self, last: bool) -> str:
        if self._thinking is None:
            said = self._held.lstrip()
            if not last and THINK.startswith(said):
                return ""
            self._thinking = said.startswith(THINK)
        if not self._thinking:
            return ""
        end = self._held.find(END_THINK)
        if end >= 0:
            self._thinking, end = False, end + len(END_THINK)
        else:
            beginning = None if last else re.search(_begun(*END_THINK), self._held)
            end = beginning.start() if beginning else len(self._held)
        shown, self._held = self._held[:end], self._held[end:]
        return shown


THINK, END_THINK = "<think>", "</think>"


def _begun(*parts: str) -> str:
    """Return a regular expression for the parts, characters or expressions of their own, of which the text may end
    behind any."""
    pattern = ""
    for part in reversed(parts):
        one = re.escape(part) if len(part) == 1 else part
        pattern = one + (rf"(?:{pattern}|\Z)" if pattern else "")
    return pattern


# -- Forms in JSON -------------------------------------------------------------------------------------------------


def _json(behind: str) -> Read:
    """Reads one call, or a list of calls, whose names and arguments are in the JSON, or whose names are in the
    opening's group. `behind` is what may follow them, a regular expression."""
    pattern = re.compile(behind)

    def read(text: str, opening: re.Match[str], tools: Sequence[Tool]) -> tuple[list[ToolCall], int]:
        value, end = json.JSONDecoder().raw_decode(text, opening.end())
        name = opening[1] if opening.re.groups else None
        calls = [ToolCall(name, _object(value))] if name else [_call(one) for one in _several(value)]
        following = pattern.match(text, end)
        return calls, following.end() if following else end

    return read


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) and value else [value]


def _call(value: Any) -> ToolCall:
    call = _object(value)
    name = call.get("name", call.get("tool_name"))
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(name, str):
        raise ValueError("a call has a name")
    return ToolCall(name, _object(json.loads(arguments) if isinstance(arguments, str) else arguments))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("an object is wanted")
    return value


# -- Forms in tags -------------------------------------------------------------------------------------------------


def _tagged(ending: str, parameter: str) -> Read:
    """Reads a call whose name is in the opening's group, and whose arguments have a tag each. `parameter` has a group
    for the name and one for the value, `ending` ends the call; both are regular expressions."""
    end_of_call, argument = re.compile(ending), re.compile(parameter, re.DOTALL)

    def read(text: str, opening: re.Match[str], tools: Sequence[Tool]) -> tuple[list[ToolCall], int]:
        name = opening[1].strip()
        end = end_of_call.search(text, opening.end())
        if end is None:
            raise ValueError("the call does not end")
        types = _types(name, tools)
        found = argument.finditer(text, opening.end(), end.start())
        return [ToolCall(name, {one[1]: _typed(one[2], types.get(one[1])) for one in found})], end.end()

    return read


def _types(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """Return what the tool's schema says of each argument's type."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: rule.get("type") for key, rule in properties.items() if isinstance(rule, Mapping)}
    return {}


def _typed(text: str, type: Any) -> Any:
    """A value as the template writes it: text as it is, all else in JSON. What is no JSON is text."""
    if type == "string":
        return text
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
        return value
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)  # as templates write without tojson


# -- Forms of their own --------------------------------------------------------------------------------------------


def _pythonic(text: str, opening: re.Match[str], tools: Sequence[Tool]) -> tuple[list[ToolCall], int]:
    """[weather(city="Rome", days=3)], with JSON's words in it."""
    end = text.find(PYTHONIC_END, opening.end())
    source = text[opening.end() : end if end >= 0 else len(text)].strip()
    try:
        listed = ast.parse(source, mode="eval").body
    except (SyntaxError, MemoryError) as error:
        raise ValueError("this is no list of calls") from error
    calls = [_python_call(call) for call in (listed.elts if isinstance(listed, ast.List) else [listed])]
    return calls, end + len(PYTHONIC_END) if end >= 0 else len(text)


PYTHONIC_END = "<|tool_call_end|>"
WORDS = {"null": None, "true": True, "false": False}


def _python_call(node: ast.AST) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("a call has named arguments")
    return ToolCall(ast.unparse(node.func), {str(each.arg): _python_value(each.value) for each in node.keywords})


def _python_value(node: ast.AST) -> Any:
    """A value that JSON has."""
    match node:
        case ast.Name(id=word) if word in WORDS:
            return WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            return dict(zip(names, map(_python_value, values), strict=True))  # ValueError for another key
        case ast.Constant() | ast.UnaryOp():
            value = ast.literal_eval(node)
            if value is None or isinstance(value, str | int | float):
                return value
        case _:
            pass
    raise ValueError("a value is one of JSON's")


def _gemma(text: str, opening: re.Match[str], tools: Sequence[Tool]) -> tuple[list[ToolCall], int]:
    """call:weather{city:<|"|>Rome<|"|>,days:3}: JSON with another quotation mark, and none around names."""
    end = text.find(GEMMA_END, opening.end())
    if end < 0:
        raise ValueError("the call does not end")
    pieces = text[opening.end() : end].split('<|"|>')
    for at, piece in enumerate(pieces):
        bare = re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', piece)
        pieces[at] = json.dumps(piece) if at % 2 else re.sub(r"\bNone\b", "null", bare)
    return [ToolCall(opening[1], _object(json.loads("".join(pieces))))], end + len(GEMMA_END)


GEMMA_END = "<tool_call|>"

# -- The table -----------------------------------------------------------------------------------------------------


def _form(name: str, opening: str, read: Read, signs: Sequence[Sequence[str]], ending: str = "") -> ToolForm:
    """signs: texts, or parts of them (see `_begun`), of which one is at the beginning of every opening, whitespace
    aside."""
    return ToolForm(name, re.compile(opening), read, re.compile("|".join(_begun(*sign) for sign in signs)), ending)


TAGS = ("<tool_call>", "<|tool_call|>", "<|START_ACTION|>", "<TOOLCALL>", "<function_call>")
_TAG, _END_TAG = "|".join(map(re.escape, TAGS)), r"\s*<(/|\|/|\|END_)(tool_call\|?|ACTION\||TOOLCALL|function_call)>"
INVOKED = ("", "minimax:", "atem:", "｜DSML｜")
_INVOKED = "|".join(INVOKED)
FORMS: tuple[ToolForm, ...] = (
    _form("JSON in a tag (Hermes, Qwen)", rf"(?:{_TAG})\s*(?=[\[{{])", _json(_END_TAG), TAGS, "</tool_call>"),
    _form(
        "function and parameter tags (Qwen3-Coder)",
        r"(?:<tool_call>\s*)?<function=([^>\n]+)>",
        _tagged(r"</function>(?:\s*</tool_call>)?", r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"),
        ("<tool_call>", "<function="),
        "</tool_call>",
    ),
    _form(
        "tags for keys and values (GLM)",
        r"<tool_call>\s*([^\s<{]+)",
        _tagged(r"</tool_call>", r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
        ("<tool_call>",),
        "</tool_call>",
    ),
    _form(
        "invoke tags (MiniMax, DeepSeek-V3.2)",
        rf"(?:<(?:{_INVOKED})(?:function_calls|tool_call)>\s*)?<(?:{_INVOKED})invoke name=\"([^\"]+)\">",
        _tagged(
            rf"</(?:{_INVOKED})invoke>(?:\s*</(?:{_INVOKED})(?:function_calls|tool_call)>)?",
            rf"<(?:{_INVOKED})parameter name=\"([^\"]+)\"[^>]*>(.*?)</(?:{_INVOKED})parameter>",
        ),
        tuple(f"<{each}{tag}" for each in INVOKED for tag in ("function_calls>", "tool_call>", "invoke name=")),
    ),
    _form("a list behind [TOOL_CALLS] (Mistral)", r"\[TOOL_CALLS\]\s*(?=\[)", _json(""), ("[TOOL_CALLS]",)),
    _form(
        "names behind [TOOL_CALLS] (Mistral)",
        r"\[TOOL_CALLS\]\s*([^\s\[{]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)",
        _json(""),
        ("[TOOL_CALLS]",),
    ),
    _form(
        "DeepSeek",
        r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
        r"([^\n<{]+)(?:\n```json\n|<｜tool▁sep｜>)",
        _json(r"(?:\n```)?\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    ),
    _form(
        "Kimi",
        r"(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+)(?::\d+)?\s*"
        r"<\|tool_call_argument_begin\|>\s*",
        _json(r"\s*<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?"),
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ),
    _form(
        "messages to functions (gpt-oss)",
        r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s*to=functions\.([\w.-]+)\s*(?:<\|channel\|>\w+)?"
        r"\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>",
        _json(r"<\|call\|>"),
        (
            (*"<|start|>assistant<|channel|>", r"\w+", r"\s*", *"to=functions."),
            (*"<|start|>assistant", r"\s*", *"to=functions."),
            (*"<|channel|>", r"\w+", r"\s*", *"to=functions."),
            "to=functions.",
        ),
    ),
    _form("calls in Python (LFM2)", r"<\|tool_call_start\|>\s*", _pythonic, ("<|tool_call_start|>",), PYTHONIC_END),
    _form("Gemma", r"<\|tool_call>call:([^\s{]+)(?=\{)", _gemma, ("<|tool_call>",), GEMMA_END),
    _form(
        "JSON alone (Llama 3)",
        r"(?:\A|<\|python_tag\|>)\s*(?=\{)|;\s*(?=\{\s*\"name\")",
        _json(r"\s*(?:;\s*\Z)?"),
        ((r"\A\s*", "{"), "<|python_tag|>", (";", r"\s*", "{", r"\s*", *'"name"')),
    ),
)
"""The forms that we know; the first that reads a template's trial is the template's."""

TRIAL = ToolCall("trial_tool", {"text": "a b", "number": 3, "nested": {"list": [1, None, True]}})
TRIAL_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": TRIAL.name,
        "description": "0",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "number": {"type": "integer"}, "nested": {"type": "object"}},
            "required": [],
        },
    },
}
