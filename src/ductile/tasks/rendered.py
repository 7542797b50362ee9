"""A conversation as its chat template renders it: what is in the text, and which parts of it the assistant says.

Templates differ in what they write around a message, in what they leave out, and in how an earlier turn looks once a
later one follows. So nothing is pieced together here: the whole conversation is rendered, and what belongs to a message
is found by rendering it again with other words in that message's place.
"""

import re
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ductile.tasks.chat_template import TextSpan
from ductile.tasks.messages import THOUGHTS, TemplateMessage
from ductile.tasks.tokenizer import Tokenizer, TokenizerError


class LeftOut(Exception):
    """Words that a chat template leaves out. The text is a sentence that names them; `place` is their message's, None
    for a tool's."""

    def __init__(self, text: str, place: int | None = None) -> None:
        super().__init__(text)
        self.place = place


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's text, and the assistant's parts of it, in order: what a policy would sample at each turn, the
    token that ends it included.

    Example, its parts in capitals: `<user>hi<end><assistant>YO<END><user>and<end><assistant>ME<END>`
    """

    text: str
    assistant: tuple[TextSpan, ...]


def render(
    tokenizer: Tokenizer, messages: Sequence[TemplateMessage], untrained: Container[int] = (), **variables: Any
) -> Rendered:
    """Return the whole conversation. untrained: places of assistant's messages that are no part of `assistant`.

    The chat template's own marks say which parts are the assistant's, where it has them (`{% generation %}`), else
    `_turn`. Raises LeftOut, and TokenizerError where the template refuses the messages.
    """
    drafts = _Drafts(tokenizer, messages, variables)
    refuse_left_out(tokenizer, messages, **variables)
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    marked = tokenizer.generations(messages, **variables)
    if marked is None or marked[0] != drafts.text:
        spans = [_turn(drafts, place) for place in turns if place not in untrained]
    else:
        silent = [drafts.words(place) for place in turns if place in untrained]
        spans = [(start, end) for start, end in marked[1] if not any(a < end and start < b for a, b in silent)]
    return Rendered(drafts.text, tuple(spans))


def refuse_left_out(
    tokenizer: Tokenizer, messages: Sequence[TemplateMessage], add_generation_prompt: bool = False, **variables: Any
) -> None:
    """Raise LeftOut when the rendered conversation lacks a message, a part of one, or a tool of `variables["tools"]`.

    Each of them gets a number behind its last word, which must be in the text then. Thoughts of earlier turns may be
    left out, as most templates do once somebody else has spoken.
    """
    marks = _Marks()
    tools = [marks.in_tool(tool) for tool in variables.get("tools") or []]
    marked = [marks.in_message(place, message) for place, message in enumerate(messages)]
    with_marks = variables | ({"tools": tools} if tools else {})
    text = tokenizer.render_chat(marked, add_generation_prompt, **with_marks)
    found = set(_MARK.findall(text))
    for mark, (place, part) in marks.parts.items():
        if mark in found or mark in text:  # digits before a mark may hide it from a single pass
            continue
        if part in THOUGHTS and mark in tokenizer.render_chat([_SPOKEN, marked[place]], False, **with_marks):
            continue
        if place < 0:
            raise LeftOut(f"the chat template leaves out {part}")
        which = f"of message {place + 1}, whose role is {messages[place]['role']}"
        known = _known_thoughts(tokenizer, with_marks) if part in THOUGHTS else None
        raise LeftOut(f"the chat template leaves out the {part} {which}{f'; it reads {known}' if known else ''}", place)


def _known_thoughts(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> str | None:
    """Return the name that the chat template has for an assistant's thoughts."""
    for name in THOUGHTS:
        message = {"role": "assistant", "content": "0", name: "thought"}
        if "thought" in tokenizer.render_chat([_SPOKEN, message], False, **variables):
            return name
    return None


_SPOKEN = {"role": "user", "content": "0"}
_MARK, _MARK_OF = re.compile(r"904\d{6}173"), "904{:06d}173"


class _Marks:
    """Numbers that stand behind words, to find out whether these are rendered."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[int, str]] = {}
        """What each number stands behind: a message's place, or -1, and the name of its part."""

    def in_message(self, place: int, message: TemplateMessage) -> TemplateMessage:
        marked = dict(message)
        for part in ("content", *THOUGHTS):
            if str(message.get(part) or "").strip():
                marked[part] = message[part] + self._new(place, part)
        if "tool_calls" in message:
            marked["tool_calls"] = [self._in_call(place, call) for call in message["tool_calls"]]
        return marked

    def in_tool(self, tool: Any) -> Any:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            return tool
        marked = {**function, "name": function["name"] + self._new(-1, f"the tool {function['name']}")}
        return {**tool, "function": marked} if "function" in tool else marked

    def _in_call(self, place: int, call: TemplateMessage) -> TemplateMessage:
        function = call.get("function", call)
        marked = {**function, "name": function["name"] + self._new(place, f"tool call {function['name']}")}
        if function["arguments"]:
            mark = self._new(place, f"arguments of tool call {function['name']}")
            marked["arguments"] = _with_argument(function["arguments"], mark)
        return {**call, "function": marked} if "function" in call else marked

    def _new(self, place: int, part: str) -> str:
        mark = _MARK_OF.format(len(self.parts))
        self.parts[mark] = place, part
        return mark


def _with_argument(arguments: Any, word: str) -> Any:
    return {**arguments, word: word} if isinstance(arguments, Mapping) else f"{arguments}{word}"


class _Drafts:
    """A conversation's text, and texts of it with other words in one message's place."""

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[TemplateMessage], variables: Mapping[str, Any]) -> None:
        self.tokenizer, self.messages, self._variables = tokenizer, messages, variables
        self.text = self.of(messages)
        self._words: dict[int, TextSpan] = {}

    def of(self, messages: Sequence[TemplateMessage], add_generation_prompt: bool = False) -> str:
        return self.tokenizer.render_chat(messages, add_generation_prompt, **self._variables)

    def words(self, place: int) -> TextSpan:
        """Return where the text differs with other words in the place of this message's, first to last."""
        if place not in self._words:
            messages = [*self.messages[:place], _reworded(self.messages[place]), *self.messages[place + 1 :]]
            other = self.of(messages)
            start = _num_common(self.text, other)
            room = min(len(self.text), len(other)) - start
            common = _num_common(self.text[::-1][:room], other[::-1][:room])
            self._words[place] = start, len(self.text) - common
        return self._words[place]

    def generation_prompt(self, place: int) -> str:
        """Return what the template writes for the policy to go on from, where it would say this message."""
        try:
            silent, asked = self.of(self.messages[:place]), self.of(self.messages[:place], add_generation_prompt=True)
        except TokenizerError:  # of templates that want other messages to begin with
            return ""
        return asked[_num_common(silent, asked) :]


def _num_common(a: str, b: str) -> int:
    """Return how many characters both begin with."""
    return bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda length: a[:length] != b[:length])


def _reworded(message: TemplateMessage) -> TemplateMessage:
    """Return the message with words that begin and end otherwise."""
    said = [text.strip() for part in ("content", *THOUGHTS) if (text := message.get(part))]
    edges = {edge for text in said for edge in (text[:1], text[-1:])}
    other = next(digit for digit in "0123456789" if digit not in edges)
    calls = message.get("tool_calls", [])
    reworded = message | {part: other for part in ("content", *THOUGHTS) if message.get(part)}
    if calls:
        reworded["tool_calls"] = [_with_other_arguments(call, other) for call in calls]
    return reworded if said or calls else reworded | {"content": other}


def _with_other_arguments(call: TemplateMessage, word: str) -> TemplateMessage:
    """Return the call with an argument more before and behind the others, sorted or not; its name stays, as templates
    repeat it beside the tool's answer."""
    function = call.get("function", call)
    given = function["arguments"]
    others = {word: word, **given, f"~{word}": word} if isinstance(given, Mapping) else f"{word}{given}{word}"
    function = {**function, "arguments": others}
    return {**call, "function": function} if "function" in call else function


def _turn(drafts: _Drafts, place: int) -> TextSpan:
    """Return the part of the text that a policy would sample in this message's place.

    It begins behind the generation prompt, or behind as much of it as the template writes where a completion follows:
    some prompts open thoughts that a completion may not have. It ends with the first token behind the words that ends
    generation, or with what the template writes behind a last message.
    """
    text, (start, end) = drafts.text, drafts.words(place)
    before = drafts.words(place - 1)[1] if place else 0
    prompt, low = drafts.generation_prompt(place), before if before <= start else 0
    for length in range(len(prompt), len(prompt) // 2, -1):
        found = text.rfind(prompt[:length], low, start)
        if found >= 0:
            start = found + length
            break
    after = drafts.words(place + 1)[0] if place + 1 < len(drafts.messages) else len(text)
    high = after if after >= end else len(text)
    found = [(text.find(each, end, high), len(each)) for each in drafts.tokenizer.end_texts]
    if ends := [each for each in found if each[0] >= 0]:
        return start, sum(min(ends))
    return start, max(end, min(high, _num_common(text, drafts.of(drafts.messages[: place + 1]))))
