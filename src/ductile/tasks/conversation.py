"""A conversation as token ids, turn by turn.

The policy's own words are never tokenised again: decoding and encoding sampled ids need not give them back, and
log-probs belong to ids. So a later turn extends the ids that were sampled, and only the environment's words go through
the tokenizer. What a chat template writes between two turns comes out of a difference: the conversation is rendered
twice, with two different completions in the assistant's place; what both have in common behind it is what follows a
completion, end-of-turn token included.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Messages = Sequence[Mapping[str, Any]]


class ApplyTemplate(Protocol):
    def __call__(self, messages: Messages, add_generation_prompt: bool = True) -> list[int]: ...


class ChatTokenizer(Protocol):
    """What is used of `ductile.tasks.tokenizer.Tokenizer`."""

    @property
    def chat_template(self) -> ApplyTemplate | None:
        """Turns messages into tokens; None for a base model, which reads plain text."""
        ...

    eos_token_ids: tuple[int, ...]

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True, **variables: Any) -> str: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def first_turn(tokenizer: ChatTokenizer, messages: Messages) -> list[int]:
    """The prompt. Without a chat template: the messages' texts, a line each, as a base model reads them."""
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template(messages)
    return tokenizer.encode("\n".join(message["content"] for message in messages))


def next_turn(tokenizer: ChatTokenizer, first: Messages, completion: Sequence[int], reply: Messages) -> list[int]:
    """What comes between the sampled `completion` and the policy's next word: its end of turn, where it did not sample
    one, the environment's words, and the start of the policy's turn.

    first: the conversation's first messages, of which some templates make a preamble.
    """
    if tokenizer.chat_template is None:
        text = "".join(f"\n{message['content']}" for message in reply) + "\n"
        return tokenizer.encode(text, add_special_tokens=False)
    between = after_completion(tokenizer.chat_template, first, reply, add_generation_prompt=True)
    if completion and completion[-1] in tokenizer.eos_token_ids:
        for end in (end_of_turn(tokenizer, first), between[:1]):
            if end[-1:] == [completion[-1]] and between[: len(end)] == end:
                return between[len(end) :]
    return between


def end_of_turn(tokenizer: ChatTokenizer, first: Messages) -> list[int]:
    """What the assistant's turn ends with, a token that ends generation last: what SFT teaches to say at its end."""
    if tokenizer.chat_template is not None:
        after = after_completion(tokenizer.chat_template, first, [], add_generation_prompt=False)
        for index, token in enumerate(after):
            if token in tokenizer.eos_token_ids:
                return after[: index + 1]
    return list(tokenizer.eos_token_ids[:1])


def as_written(tokenizer: ChatTokenizer, first: Messages, content: str) -> str:
    """An assistant's content as the chat template writes it: many templates cut the white space around it."""
    if tokenizer.chat_template is None or content == content.strip():
        return content
    bare, spaced = (
        tokenizer.chat_template([*first, {"role": "assistant", "content": text}], False) for text in ("0", " \n0\n ")
    )
    return content.strip() if spaced == bare else content


def after_completion(
    template: ApplyTemplate, first: Messages, reply: Messages, add_generation_prompt: bool
) -> list[int]:
    """The tokens behind an assistant's completion that stands between `first` and `reply`."""
    a, b = (
        template([*first, {"role": "assistant", "content": completion}, *reply], add_generation_prompt)
        for completion in ("0", "1")
    )
    num_common = 0
    for token_a, token_b in zip(reversed(a), reversed(b), strict=False):
        if token_a != token_b:
            break
        num_common += 1
    return a[len(a) - num_common :]
