"""A conversation as its chat template renders it: what is in the text, and which parts of it the assistant says.

Templates differ in what they write around a message, in what they leave out, and in how an earlier turn looks once a
later one follows. So nothing is pieced together here: the whole conversation is rendered, and what belongs to a message
is found by rendering it again with other words in that message's place.
"""

from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ductile.tasks.chat_template import TextSpan
from ductile.tasks.left_out import refuse_left_out, refuse_unread
from ductile.tasks.messages import THOUGHTS, TemplateMessage
from ductile.tasks.tokenizer import Tokenizer, TokenizerError


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's text, and the assistant's parts of it, in order: what a policy would sample at each turn, the
    token that ends it included.

    Example, its parts in capitals: `<user>hi<end><assistant>YO<END><user>and<end><assistant>ME<END>`
    """

    text: str
    assistant: tuple[TextSpan, ...]
    unprompted: str = ""
    """Generation prompt that a policy would go on from in the last turn, where the text has another one there: many
    prompts open thoughts, `<assistant><think>`, which a completion without thoughts does not have."""


def render(
    tokenizer: Tokenizer, messages: Sequence[TemplateMessage], untrained: Container[int] = (), /, **variables: Any
) -> Rendered:
    """Return the whole conversation. untrained: places of assistant's messages that are no part of `assistant`.

    The chat template's own marks say which parts are the assistant's, where it has them (`{% generation %}`), else
    `_turn`. Raises LeftOut, and TokenizerError where the template refuses the messages.
    """
    drafts = _Drafts(tokenizer, messages, variables)
    refuse_unread(tokenizer, variables)
    refuse_left_out(tokenizer, messages, **variables)
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    marked = tokenizer.generations(messages, **variables)
    if marked is None or marked[0] != drafts.text:
        spans = [span for place in turns if place not in untrained for span in _turn(drafts, place)]
    else:
        silent = [drafts.words(place) for place in turns if place in untrained]
        spans = [(start, end) for start, end in marked[1] if not any(a < end and start < b for a, b in silent)]
    prompt = drafts.generation_prompt(turns[-1])
    prompted = drafts.text.endswith(prompt, 0, drafts.start(turns[-1]))
    return Rendered(drafts.text, tuple(spans), "" if prompted else prompt)


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
            self._words[place] = self.changed(place, _reworded(self.messages[place]))
        return self._words[place]

    def changed(self, place: int, message: TemplateMessage) -> TextSpan:
        """Return where the text differs with `message` in this place, first to last."""
        other = self.of([*self.messages[:place], message, *self.messages[place + 1 :]])
        start = num_common(self.text, other)
        room = min(len(self.text), len(other)) - start
        return start, len(self.text) - num_common(self.text[::-1][:room], other[::-1][:room])

    def start(self, place: int) -> int:
        """Return where a policy would begin to say this message: behind the generation prompt, or behind as much of it
        as the template writes where a completion follows. Some prompts open thoughts, which a completion opens itself
        or does not have."""
        prompt, start = self.generation_prompt(place), self.words(place)[0]
        if self.text.endswith(prompt, 0, start):
            return start
        before = self.words(place - 1)[1] if place else 0
        low = before if before <= start else 0  # some templates move messages
        for length in range(len(prompt), len(prompt) // 2, -1):
            # Words may open the thoughts themselves, and then they begin behind the whole prompt.
            found = self.text.rfind(prompt[:length], low, start + (length - 1 if length == len(prompt) else 0))
            if found >= 0:
                return found + length
        return start

    def generation_prompt(self, place: int) -> str:
        """Return what the template writes for the policy to go on from, where it would say this message."""
        try:
            silent, asked = self.of(self.messages[:place]), self.of(self.messages[:place], True)
        except TokenizerError:  # of templates that want other messages to begin with
            return ""
        return asked[num_common(silent, asked) :]


def num_common(a: str, b: str) -> int:
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


def _turn(drafts: _Drafts, place: int) -> list[TextSpan]:
    """Return the parts of the text that a policy would sample in this message's place.

    It is one, but where the template writes answers of tools between the message's calls and its content, as Gemma 4's.
    """
    text, start, end = drafts.text, drafts.start(place), drafts.words(place)[1]
    message, ends = drafts.messages[place], drafts.tokenizer.end_texts
    mixed = bool(message.get("content") and message.get("tool_calls"))
    behind = len(text) - len(text[end:].lstrip())
    if not mixed and (own := [each for each in ends if text.startswith(each, behind)]):
        return [(start, behind + min(map(len, own)))]  # of most templates; each draft takes its time
    after = drafts.words(place + 1)[0] if place + 1 < len(drafts.messages) else len(text)
    if not mixed or not start < after < end:
        return [(start, _end_of_turn(drafts, place, end, after))]
    calls = {part: said for part, said in message.items() if part != "content"}
    end_of_calls = num_common(text[:after], drafts.of([*drafts.messages[:place], calls]))
    content = drafts.changed(place, message | {"content": _reworded({"content": message["content"]})["content"]})
    return [(start, end_of_calls), (content[0], _end_of_turn(drafts, place, content[1], after))]


def _end_of_turn(drafts: _Drafts, place: int, end: int, after: int) -> int:
    """Return where a turn ends whose words end at `end`: behind the first token there that ends generation, else
    behind the control token that follows the words, else with what the template writes behind a last message. after:
    where the words of the next message begin."""
    text, high = drafts.text, after if after >= end else len(drafts.text)
    found = [(text.find(each, end, high), len(each)) for each in drafts.tokenizer.end_texts]
    if ends := [each for each in found if each[0] >= 0]:
        return sum(min(ends))
    if (token := drafts.tokenizer.control_tokens) and (following := token.match(text, end, high)):
        return following.end()  # as gpt-oss', which ends turns that others follow with a token of their own
    return max(end, min(high, num_common(text, drafts.of(drafts.messages[: place + 1]))))
