"""Messages of a conversation: from the forms that people and APIs write to the one that chat templates take.

{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "add", "arguments": "{\"a\": 1}"}}]}
{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
"""

import json
from collections.abc import Mapping
from typing import Any

TemplateMessage = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of a message. A `developer` is a `system` to templates that do not render one."""

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of an assistant's thoughts. Templates read the first, or the second."""


class BadMessage(Exception):
    """A message that no template can render. The text goes on after "message 3"."""


def for_template(message: Mapping[str, Any]) -> TemplateMessage:
    """Return the message as templates take it: without what is null or empty, its content as text, the arguments of
    its tool calls as objects. Raises BadMessage."""
    given = {name: value for name, value in message.items() if value is not None}
    if given.get("role") not in ROLES:
        raise BadMessage(f"has role {given.get('role')!r}; roles are {', '.join(ROLES)}")
    if given.get("type") in ("text", "message"):
        del given["type"]  # lm-eval says so of each message, and OpenAI's other API
    if "content" in given:
        given["content"] = _text_of(given["content"])
    for name in [name for name in given if name not in ("role", "content", "tool_calls")]:
        if given[name] in ([], {}):
            del given[name]
        elif not isinstance(given[name], str):
            raise BadMessage(f"has a field {name} that is {type_of(given[name])}; templates read texts and tool_calls")
    if "tool_calls" in given:
        given["tool_calls"] = _tool_calls(given["tool_calls"])
    if given.get("tool_calls") and given["role"] != "assistant":
        raise BadMessage("has tool_calls, which only the assistant makes")
    says = any(given.get(name) for name in ("tool_calls", *THOUGHTS))
    if "content" not in given and not (given["role"] == "assistant" and says):
        raise BadMessage("has no content")
    return given


def as_given_to_templates(message: Mapping[str, Any]) -> TemplateMessage:
    """Return the message as `transformers` gives it to a template: without nulls, its thoughts under both names."""
    given = {name: value for name, value in message.items() if value is not None}
    thoughts = next((given[name] for name in THOUGHTS if name in given), None)
    return given if thoughts is None else {"thinking": thoughts, **given, "reasoning_content": thoughts}


def _text_of(content: Any) -> str:
    """Return a content that is text or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadMessage(f"has a content that is {type_of(content)}, not text")
    for number, part in enumerate(content, 1):
        if not (isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else None
            raise BadMessage(
                f"has a part {number} {f'of type {kind!r}' if kind not in (None, 'text') else 'without text'}; "
                'parts are {"type": "text", "text": ...}'
            )
    return "".join(part["text"] for part in content)


def _tool_calls(calls: Any) -> list[TemplateMessage]:
    if not isinstance(calls, list):
        raise BadMessage(f"has tool_calls that are {type_of(calls)}, not a list")
    return [_tool_call(f"has a tool call {number}", call) for number, call in enumerate(calls, 1)]


def _tool_call(which: str, call: Any) -> TemplateMessage:
    """Return {"type": "function", "function": {"name": ..., "arguments": {...}}} and the call's id."""
    nested = isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
    function = dict(call["function"]) if nested else call
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise BadMessage(f'{which} that is not {{"function": {{"name": ..., "arguments": ...}}}}')
    if nested and call.get("type", "function") != "function":
        raise BadMessage(f"{which} of type {call['type']!r}; calls are of functions")
    arguments = function.get("arguments")
    arguments = _parsed(which, arguments) if isinstance(arguments, str) else arguments or {}
    if not isinstance(arguments, Mapping):
        raise BadMessage(f"{which} whose arguments are {type_of(arguments)}; they are an object, or its JSON text")
    # Columns of other tools' arguments, as Arrow fills them.
    parsed = {**function, "arguments": {name: value for name, value in arguments.items() if value is not None}}
    return {**call, "function": parsed} if nested else parsed


def _parsed(which: str, arguments: str) -> Any:
    """Return what an API's text is of."""
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        raise BadMessage(f"{which} whose arguments are text that is not JSON: {arguments[:40]!r}") from None


def type_of(value: Any) -> str:
    """Return what JSON calls a value: `a number`."""
    if value in ("", [], {}) and not isinstance(value, bool | int | float):
        return "empty"
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "null")
