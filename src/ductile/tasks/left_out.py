"""Words that a chat template leaves out.

A template is a program that reads what it knows. A role, a field or a tool that it does not know is gone without a
word, and so is what a model should have learned from it.
"""

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from ductile.tasks.messages import THOUGHTS
from ductile.tasks.task import TaskError

END_OF_THOUGHTS = "</think>"
NOT_WORDS = ("role", "name", "tool_call_id")
"""Fields of a message that say whose it is; few templates write them."""


class LeftOut(TaskError):
    """Words that a chat template leaves out. The text is a sentence that names them; `place` is that of their message,
    None for a tool's."""

    def __init__(self, text: str, place: int | None = None) -> None:
        super().__init__(text)
        self.place = place


class RendersChat(Protocol):
    """The part of `ductile.tasks.tokenizer.Tokenizer` that is used here."""

    def reads(self, name: str) -> bool: ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, /, **variables: Any
    ) -> str: ...


def refuse_left_out(
    tokenizer: RendersChat,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = False,
    /,
    **variables: Any,
) -> None:
    """Raise LeftOut when the rendered conversation lacks a message, a part of one, or a tool of `variables["tools"]`.

    Each of them gets a number behind its last word, which must be in the text then. Thoughts of earlier turns may be
    left out, as most templates do once somebody else has spoken.
    """
    marks = _Marks(_speakers(messages))
    tools = [marks.in_tool(tool) for tool in variables.get("tools") or []]
    marked = [marks.in_message(place, message) for place, message in enumerate(messages)]
    if not add_generation_prompt and messages and messages[-1]["role"] == "assistant":
        marked[-1] = marks.in_thoughts(len(messages) - 1, marked[-1])
    with_marks = variables | ({"tools": tools} if tools else {})
    text = tokenizer.render_chat(marked, add_generation_prompt, **with_marks)
    found = set(_MARK.findall(text))
    for mark, (place, part) in marks.parts.items():
        if mark in found or mark in text:  # digits before a mark may hide it from the pass over the whole text
            continue
        if part in THOUGHTS and mark in tokenizer.render_chat([_SPOKEN, marked[place]], False, **with_marks):
            continue
        if place < 0:
            raise LeftOut(f"the chat template leaves out {part}")
        which = f"of message {place + 1}, whose role is {messages[place]['role']}"
        raise LeftOut(f"the chat template leaves out the {part} {which}", place)


def refuse_unread(tokenizer: RendersChat, variables: Mapping[str, Any]) -> None:
    """Raise LeftOut when the chat template does not read one of a row's or a request's variables. One that is false or
    null asks for nothing: `enable_thinking: false` is true of a template without thoughts."""
    for name, value in variables.items():
        if name != "tools" and value not in (None, False) and not tokenizer.reads(name):
            raise LeftOut(f"the chat template does not read {name}, which chat_template_kwargs has")


_SPOKEN = {"role": "user", "content": "0"}
_MARK, _MARK_OF = re.compile(r"904\d{6}173"), "904{:06d}173"


def _speakers(messages: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Return ("name", role) for each role of which several speak. A tool's answer says by its place whose it is."""
    named = {(message["role"], message.get("name")) for message in messages if message["role"] != "tool"}
    return {("name", role) for role, name in named if name and len({each for each in named if each[0] == role}) > 1}


def _says_something(text: object) -> TypeGuard[str]:
    return isinstance(text, str) and bool(text.strip())


class _Marks:
    """Numbers that stand behind words, to find out whether these are rendered."""

    def __init__(self, speakers: Container[tuple[str, str]]) -> None:
        """speakers: ("name", role) where names tell messages of that role apart."""
        self._speakers = speakers
        self.parts: dict[str, tuple[int, str]] = {}
        """Part behind which each number stands: a message's place, or -1, and the name of its part."""

    def in_message(self, place: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        marked = dict(message)
        for part, text in message.items():
            if (part not in NOT_WORDS or (part, message["role"]) in self._speakers) and _says_something(text):
                marked[part] = text + self._new(place, part)
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._in_call(place, call) for call in message["tool_calls"]]
        return marked

    def in_thoughts(self, place: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Mark thoughts that are a part of the content: some templates never write them."""
        before, end, after = str(message.get("content", "")).partition(END_OF_THOUGHTS)
        mark = self._new(place, "thoughts in the content") if end else ""
        return {**message, "content": f"{before}{mark}{end}{after}"} if end else message

    def in_tool(self, tool: Any) -> Any:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            return tool
        marked = {**function, "name": function["name"] + self._new(-1, f"the tool {function['name']}")}
        return {**tool, "function": marked} if "function" in tool else marked

    def _in_call(self, place: int, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """Mark the call's arguments, or its name where it has none: where the ones are, the other is, too."""
        function = call.get("function", call)
        mark = self._new(place, f"tool call {function['name']}")
        if given := function.get("arguments"):
            marked = {
                **function,
                "arguments": {**given, mark: mark} if isinstance(given, Mapping) else f"{given}{mark}",
            }
        else:
            marked = {**function, "name": function["name"] + mark}
        return {**call, "function": marked} if "function" in call else marked

    def _new(self, place: int, part: str) -> str:
        mark = _MARK_OF.format(len(self.parts))
        self.parts[mark] = place, part
        return mark
