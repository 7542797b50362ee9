"""JSONL files: one object a line, read whole, every complaint with its file and line."""

import json
from pathlib import Path
from typing import Any, Literal

from ductile.tasks.task import TaskError
from ductile.user_files import NotText, read_text

Row = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")


def read_rows(path: str | Path) -> list[tuple[str, Row]]:
    """("file:line", object) for each line that is not blank. Raises TaskError."""
    file = Path(path)
    try:
        text = read_text(file)
    except FileNotFoundError:
        raise TaskError(f"there is no file {file}") from None
    except IsADirectoryError:
        raise TaskError(f"{file} is a folder; name a .jsonl file in it") from None
    except NotText as error:
        raise TaskError(str(error)) from None
    # Not splitlines(): a JSON string may hold U+2028 and its like, which are no line ends here.
    rows = [(f"{file}:{n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not rows:
        raise TaskError(f"{file} has no lines")
    return [(where, _parse(where, line)) for where, line in rows]


def conversation(where: str, row: Row, *, ends_with: Literal["prompt", "completion"]) -> list[dict[str, str]]:
    """The row's messages: `messages`, or `prompt` (and `completion`, when a completion is asked for).

    Raises TaskError when it has neither or both, when a message is malformed, or when the last one is the wrong
    side's.
    """
    wants_completion = ends_with == "completion"
    short = "prompt and completion" if wants_completion else "prompt"
    if "messages" in row and "prompt" in row:
        raise TaskError(f"{where}: has both messages and prompt; keep one of them")
    if "messages" in row:
        messages = _messages(where, row["messages"])
    elif "prompt" in row:
        messages = [{"role": "user", "content": _text(where, row, "prompt")}]
        if wants_completion:
            messages.append({"role": "assistant", "content": _text(where, row, "completion")})
    else:
        raise TaskError(f"{where}: has neither messages nor {short}; its keys are {', '.join(row) or 'none'}")
    completed = messages[-1]["role"] == "assistant"
    if completed and not wants_completion:
        raise TaskError(f"{where}: the last message is the assistant's; a prompt ends with another role's")
    if wants_completion and not any(message["role"] == "assistant" for message in messages):
        raise TaskError(f"{where}: no message is the assistant's, so there is nothing to train on")
    return messages


def _parse(where: str, line: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise TaskError(f"{where}: is {_kind(row)}; each line must be an object, {{...}}")
    return row


def _messages(where: str, messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise TaskError(f"{where}: messages must be a list of at least one message, not {_kind(messages)}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise TaskError(f'{where}: message {number} must be {{"role": ..., "content": ...}}')
        if message["role"] not in ROLES:
            raise TaskError(f"{where}: message {number} has role {message['role']!r}; roles are {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise TaskError(f"{where}: the content of message {number} is {_kind(message['content'])}, not text")
    return messages


def _text(where: str, row: Row, key: str) -> str:
    if key not in row:
        raise TaskError(f"{where}: has a prompt and no {key}")
    if not isinstance(row[key], str) or not row[key]:
        raise TaskError(f"{where}: {key} is {_kind(row[key])}, not text")
    return row[key]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    if value == "" or value == [] or value == {}:
        return "empty"
    return names.get(type(value), "null")
