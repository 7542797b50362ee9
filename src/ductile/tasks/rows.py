"""JSONL files: one object a line, read whole, every complaint with its file and line.

A row may have the form of OpenAI and TRL, of ShareGPT, or of Alpaca:

    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}], "tools": [...]}
    {"prompt": "hi", "completion": "yo"}     or both as lists of messages
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], "system": "Be short."}
    {"instruction": "Greet.", "input": "in Greek", "output": "yia"}
    {"text": "Once upon a time"}             to train on whole
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ductile.core.rollouts.sampling_limits import RESERVED_VARIABLES
from ductile.error_text import error_text
from ductile.tasks.messages import BadMessage, TemplateMessage, for_template, type_of
from ductile.tasks.task import TaskError
from ductile.user_files import NotText, read_text

Row = dict[str, Any]

FORMS = ("messages", "prompt", "conversations", "instruction")
"""Fields that begin a conversation; a row has one of them."""

RENDERED = ("system", "tools", "chat_template_kwargs")
"""Fields that the prompt is rendered with."""

OF_A_FORM: dict[str, tuple[str, ...]] = {
    "messages": (),
    "prompt": ("completion",),
    "conversations": (),
    "instruction": ("input", "output", "history"),
}
"""Fields that belong to each form."""

ABOUT = frozenset(
    (
        "id",
        "uid",
        "uuid",
        "idx",
        "index",
        "row_id",
        "conversation_id",
        "prompt_id",
        "message_id",
        "source",
        "dataset",
        "origin",
        "category",
        "subcategory",
        "task_category",
        "problem_type",
        "question_type",
        "difficulty",
        "title",
        "hash",
        "turn",
        "num_turns",
        "subset",
        "split",
        "task",
        "lang",
        "language",
        "license",
        "url",
        "created_at",
        "timestamp",
        "date",
        "model",
        "model_name",
        "metadata",
        "meta",
        "tags",
        "topic",
        "parallel_tool_calls",
    )
)
"""Fields that tell something about a row or a message and change nothing of it."""

OTHER_NAMES = {
    "messages": ("conversation", "dialog", "dialogue", "chat"),
    "prompt": ("question", "query", "problem", "input"),
    "completion": ("response", "answer", "answers", "solution", "output", "chosen"),
    "output": ("response", "answer", "completion"),
    "system": ("system_prompt",),
}
"""Names that data sets have for the same fields; a sentence tells them to those who must rename one."""

SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles by what ShareGPT's `from` calls them; its `function_call` is an assistant's message, too."""


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A row as a conversation, ready for a chat template."""

    messages: list[TemplateMessage]
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Variables of the chat template: the row's `tools` and its `chat_template_kwargs`."""
    untrained: frozenset[int] = frozenset()
    """Places of assistant's messages with `weight: 0` or `train: false`."""


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
    if text.lstrip().startswith("[") and _is_array(text):
        raise TaskError(f"{file} is one JSON array; write an object a line: jq -c '.[]' {file} > rows.jsonl")
    return [(where, _parse(where, line)) for where, line in rows]


def _is_array(text: str) -> bool:
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(text), list)
    return False


def prompt_of(where: str, row: Row) -> ChatRow:
    """Return the row's conversation up to the policy's turn. The row's other fields are its reward's.

    Raises TaskError when there is none, when a message is malformed, or when the last one is the assistant's.
    """
    prompt = _conversation(where, row, with_completion=False)
    if prompt.messages[-1]["role"] == "assistant":
        raise TaskError(f"{where}: the last message is the assistant's; a prompt ends with another role's")
    return prompt


def conversation_of(where: str, row: Row) -> ChatRow:
    """Return the row's whole conversation, to train on. Raises TaskError as `prompt_of` does, and when no message is
    the assistant's, or a field of the row has no meaning."""
    said = {name: value for name, value in row.items() if value is not None}
    chat = _conversation(where, said, with_completion=True)
    form = _form(where, said, with_completion=True)
    repeated = [name for name in said if name != form and _repeats(said[name], chat.messages)]
    _refuse_unknown(where, said, (form, *OF_A_FORM[form], *RENDERED, "weight", "train", *repeated))
    if not any(message["role"] == "assistant" for message in chat.messages):
        raise TaskError(f"{where}: no message is the assistant's, so there is nothing to train on")
    return chat


def text_of(where: str, row: Row) -> str | None:
    """Return the text of a row that is no conversation: `{"text": ...}`."""
    if "text" not in row or any(form in row for form in FORMS):
        return None
    _refuse_unknown(where, row, ("text",))
    return _text(where, row, "text")


def _refuse_unknown(where: str, row: Row, meant: Sequence[str]) -> None:
    unknown = [name for name, value in row.items() if name not in (*meant, *ABOUT) and value not in (None, "", [], {})]
    if unknown:
        which = f"a field {unknown[0]}, which has" if len(unknown) == 1 else f"fields {', '.join(unknown)}, which have"
        it = "it" if len(unknown) == 1 else "them"
        raise TaskError(
            f"{where}: has {which} no meaning beside {meant[0]}; remove {it}, or put what is only about the row under "
            f"metadata{_renamed({name: row[name] for name in unknown}, RENDERED)}"
        )


def _other_name(row: Row, name: str) -> str | None:
    """Return the row's field that other data sets call so, and ductile `name`."""
    kind = list if name == "messages" else str
    return next((other for other in OTHER_NAMES.get(name, ()) if isinstance(row.get(other), kind)), None)


def _renamed(row: Row, wanted: Sequence[str]) -> str:
    """Return what to rename, as the end of a sentence."""
    found = [f"{other} to {name}" for name in wanted if (other := _other_name(row, name))]
    return f"; rename {' and '.join(found)}, if this is meant" if found else ""


def _repeats(value: Any, messages: Sequence[TemplateMessage]) -> bool:
    """Return whether a field says what a message says anyway, as the `prompt` beside `messages` of many data sets."""
    return isinstance(value, str) and any(message.get("content") == value for message in messages)


def _form(where: str, row: Row, *, with_completion: bool) -> str:
    """Return the field that begins the row's conversation. Others may repeat what its messages say."""
    there = [form for form in FORMS if form in row]
    forms = [form for form in there if row[form] is not None] or there  # null in a column that other rows fill
    if not forms:
        short = "messages, prompt and completion" if with_completion else "messages nor prompt"
        known = "conversations or instruction"
        wanted = ("messages",) if _other_name(row, "messages") else ("prompt", "completion")[: 1 + with_completion]
        raise TaskError(
            f"{where}: has neither {short}, {known}; its keys are {', '.join(row) or 'none'}{_renamed(row, wanted)}"
        )
    form = next((form for form in ("messages", "conversations") if form in forms), forms[0])
    others = [other for other in forms if other != form]
    said = [message for message in row[form] if isinstance(message, Mapping)] if isinstance(row[form], list) else []
    texts = [message.get(key) for message in said for key in ("content", "value")]
    for other in others:
        if not isinstance(row[other], str) or row[other] not in texts:
            raise TaskError(
                f"{where}: has both {' and '.join(name for name in forms if name in (form, other))}; keep one of them"
            )
    return form


def _conversation(where: str, row: Row, *, with_completion: bool) -> ChatRow:
    form = _form(where, row, with_completion=with_completion)
    match form:
        case "messages":
            given = _list(where, row, "messages")
        case "prompt":
            given = _side(where, row, "prompt", "user")
            given += _side(where, row, "completion", "assistant") if with_completion else []
        case "conversations":
            given = [_from_sharegpt(where, n, said) for n, said in enumerate(_list(where, row, "conversations"), 1)]
        case _:
            given = _from_alpaca(where, row, with_completion)
    if row.get("system"):
        if given and isinstance(given[0], Mapping) and given[0].get("role") == "system":
            raise TaskError(f"{where}: has system beside a system message; keep one of them")
        given = [{"role": "system", "content": _text(where, row, "system")}, *given]
    messages, untrained = list[TemplateMessage](), set[int]()
    for place, message in enumerate(given):
        try:
            messages.append(_message(message))
        except BadMessage as error:
            raise TaskError(f"{where}: message {place + 1} {error}") from None
        is_trained = _trained(where, row) and _trained(where, message, place)
        if messages[-1]["role"] == "assistant" and not is_trained:
            untrained.add(place)
        if messages[-1]["role"] != "assistant" and (message.get("weight") or message.get("train")):
            raise TaskError(
                f"{where}: message {place + 1} asks to be trained on, and its role is {messages[-1]['role']}; only the "
                f'assistant\'s are, or everything with data.loss_on = "all"'
            )
    return ChatRow(messages, _variables(where, row), frozenset(untrained))


def _message(message: Any) -> TemplateMessage:
    """Return a message as templates take it, without what is only about it. Raises BadMessage."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise BadMessage('must be {"role": ..., "content": ...}')
    return for_template({name: value for name, value in message.items() if name not in (*ABOUT, "weight", "train")})


def _trained(where: str, table: Mapping[str, Any], place: int | None = None) -> bool:
    """Return what `weight` or `train` of a row or of a message says."""
    for name in ("weight", "train"):
        value = table.get(name, True)
        if value not in (None, True, False):  # 0 and 1 are equal to these
            which = "the row's" if place is None else f"message {place + 1}'s"
            raise TaskError(f"{where}: {which} {name} is {value!r}; it must be 0 or 1")
        if value is not None and not value:
            return False
    return True


def _variables(where: str, row: Row) -> dict[str, Any]:
    """Return the row's variables of the chat template."""
    tools, kwargs = row.get("tools"), row.get("chat_template_kwargs") or {}
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise TaskError(f"{where}: tools is text that is not JSON; write a list of objects") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise TaskError(f"{where}: tools is {type_of(tools)}; it must be a list of objects")
    if not isinstance(kwargs, dict):
        raise TaskError(f"{where}: chat_template_kwargs is {type_of(kwargs)}; it must be an object")
    if taken := sorted(kwargs.keys() & RESERVED_VARIABLES):
        raise TaskError(f"{where}: chat_template_kwargs may not hold {taken[0]}, which the row gives by itself")
    given = {name: value for name, value in kwargs.items() if value is not None}  # columns of other rows
    return given | ({"tools": [_tool(tool) for tool in cast(list[Row], tools)]} if tools else {})


def _tool(tool: Row) -> Row:
    """Return a tool as templates take it. LLaMA-Factory's rows have bare functions."""
    return _without_nulls({"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool)


def _without_nulls(schema: Any) -> Any:
    """Return a tool's schema without the nulls with which Arrow fills columns that are other tools'."""
    if isinstance(schema, list):
        return [_without_nulls(each) for each in cast(list[Any], schema)]
    if not isinstance(schema, dict):
        return schema
    values = cast(Row, schema)
    return {
        name: value if name in ("default", "const", "enum", "examples") else _without_nulls(value)
        for name, value in values.items()
        if value is not None or name in ("default", "const")
    }


def _side(where: str, row: Row, key: str, role: str) -> list[Any]:
    """Return a prompt or a completion, which are text or lists of messages."""
    if isinstance(row.get(key), list):
        return _list(where, row, key)
    if isinstance(row.get(key), dict):
        return [row[key]]
    return [{"role": role, "content": _text(where, row, key)}]


def _from_sharegpt(where: str, number: int, said: Any) -> Any:
    if not isinstance(said, Mapping) or "from" not in said:
        return said  # some of these have role and content after all
    if "value" not in said:
        raise TaskError(f"{where}: message {number} is from {said['from']!r} and has no value")
    role, text = said["from"], said["value"]
    others = {name: value for name, value in said.items() if name not in ("from", "value")}
    if role == "function_call":
        try:
            calls = json.loads(str(text))
        except ValueError:
            raise TaskError(f"{where}: message {number} is a function_call whose value is not JSON") from None
        calls = calls if isinstance(calls, list) else [calls]
        return others | {"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls]}
    if role not in SHAREGPT:
        raise TaskError(
            f"{where}: message {number} is from {role!r}; senders are {', '.join([*SHAREGPT, 'function_call'])}"
        )
    return others | {"role": SHAREGPT[role], "content": text}


def _from_alpaca(where: str, row: Row, with_completion: bool) -> list[Any]:
    """Return the pairs of `history`, the instruction with its input on the next line, and the output."""
    given: list[Any] = []
    for pair in row.get("history") or []:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise TaskError(f"{where}: history must be a list of pairs of texts, of the user and of the assistant")
        given += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
    words = _text(where, row, "instruction")
    if row.get("input"):
        words += "\n" + _text(where, row, "input")
    given.append({"role": "user", "content": words})
    if with_completion:
        given.append({"role": "assistant", "content": _text(where, row, "output")})
    return given


def _parse(where: str, line: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; lists within lists
        raise TaskError(f"{where}: cannot be read: {error_text(error)}") from None
    if not isinstance(row, dict):
        raise TaskError(f"{where}: is {type_of(row)}; each line must be an object, {{...}}")
    return row


def _list(where: str, row: Row, key: str) -> list[Any]:
    if not isinstance(row[key], list) or not row[key]:
        raise TaskError(f"{where}: {key} must be a list of at least one message, not {type_of(row[key])}")
    return list(row[key])


def _text(where: str, row: Row, key: str) -> str:
    if key not in row:
        which = "a prompt" if key == "completion" else "an instruction"
        raise TaskError(f"{where}: has {which} and no {key}{_renamed(row, [key])}")
    if not isinstance(row[key], str) or not row[key]:
        kind = type_of(row[key])
        raise TaskError(f"{where}: {key} is {kind}{'' if kind == 'empty' else ', not text'}")
    return row[key]
