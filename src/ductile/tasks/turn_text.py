"""A turn of the policy's as text: for rewards and the environment as the conversation has it, for people as sampled.

    the generation prompt     <|assistant|><think>\\n
    what is sampled                                  2 and 2\\n</think>\\n4<|end|>
    what a reward is given                  <think>\\n2 and 2\\n</think>\\n4

A reward is given the whole turn: what the chat template has opened of it already, and what was sampled, special tokens
included. Only what ended the turn is no part of it.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ductile.records import Generation, Sampling
from ductile.tasks.conversation import ChatTokenizer, Messages
from ductile.tasks.rendered import num_common
from ductile.tasks.tokenizer import TokenizerError

NUM_CONTEXT = 8
"""Tokens before a turn that are decoded with it: many decoders drop the space that a text begins with."""

_TAG = re.compile(r"<([\w:-]+)>|\[([A-Z_]+)\]")
_CLOSED = re.compile(r"(</[^<>]+>|\[/[A-Z_]+\]|<\|END_\w+\|>)\s*$")


class TurnText:
    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._opened: dict[str, str] = {}
        """Text that is opened, by generation prompt."""

    def opened(self, messages: Messages, /, **variables: Any) -> str:
        r"""Return what the chat template has written of the policy's turn behind `messages`, before its first token:
        "<think>\n". It is "" where that is nothing, or is closed again ("<think>\n\n</think>\n\n")."""
        template = self._tokenizer.chat_template
        if template is None:
            return ""
        render = partial(template.render_chat, **variables)
        prompt = render(messages, True)
        start = num_common(render(messages, False), prompt)
        generation_prompt = prompt[start:]
        if generation_prompt not in self._opened:
            turns = list[str]()
            said, reply = {"role": "assistant", "content": "0"}, {"role": "user", "content": "1"}
            for more in ([said], [said, reply]):
                with suppress(TokenizerError):  # of a template that wants other messages
                    turns.append(render([*messages, *more], False)[start:])
            self._opened[generation_prompt] = opened_in(generation_prompt, turns)
        return self._opened[generation_prompt]

    def said(self, prompt: Sequence[int], generation: Generation, sampling: Sampling) -> str:
        """Return the text that was sampled behind `prompt`, without the token or the stop string that ended it."""
        token_ids = list(generation.token_ids)
        ended = generation.finish_reason == "stop"
        stops = [text for text in sampling.stop if text and ended and not sampling.include_stop_str_in_output]
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._tokenizer.eos_token_ids)}
        if ended and token_ids and token_ids[-1] in ends:
            del token_ids[-1]
        text = sampled_text(self._tokenizer, prompt, token_ids, sampling.skip_special_tokens)
        if (cut := _first(stops, text)) is not None:
            return text[:cut]
        plain = sampled_text(self._tokenizer, prompt, token_ids, skip_special_tokens=True)
        if (cut := _first(stops, plain)) is None:
            return text
        # A special token stands within the stop string, where engines look for it without these, too.
        for num_before in range(len(token_ids), -1, -1):
            before = sampled_text(self._tokenizer, prompt, token_ids[:num_before], skip_special_tokens=True)
            if len(before) <= cut:
                return sampled_text(self._tokenizer, prompt, token_ids[:num_before]) + plain[len(before) : cut]
        return ""


def sampled_text(
    tokenizer: ChatTokenizer, prompt: Sequence[int], token_ids: Sequence[int], skip_special_tokens: bool = False
) -> str:
    """Return all of `token_ids` as text, spelled as behind `prompt`."""
    context = list(prompt[-NUM_CONTEXT:])
    before, whole = (tokenizer.decode([*context, *more], skip_special_tokens) for more in ((), token_ids))
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(token_ids, skip_special_tokens)  # the prompt ends within a character


def opened_in(generation_prompt: str, turns: Sequence[str]) -> str:
    """Return the end of a generation prompt that belongs to what the policy says.

    turns: how the template writes a turn of the assistant's, its header first. The prompt's end belongs to the turn
    from where it is no header any more, or from a tag that the template closes in a turn and not in the prompt.
    """
    begins = [num_common(generation_prompt, turn) for turn in turns]
    for tag in _TAG.finditer(generation_prompt):
        end_tag = f"</{tag[1]}>" if tag[1] else f"[/{tag[2]}]"
        if end_tag not in generation_prompt[tag.end() :] and any(end_tag in turn for turn in turns):
            begins.append(tag.start())
    opened = generation_prompt[min(begins, default=len(generation_prompt)) :]
    return opened if opened.strip() and not _CLOSED.search(opened) else ""


def _first(stops: Iterable[str], text: str) -> int | None:
    """Return where the first of the stop strings begins in the text; None where there is none."""
    return min((at for at in map(text.find, stops) if at >= 0), default=None)
