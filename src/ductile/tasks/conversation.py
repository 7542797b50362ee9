"""A conversation as token ids, turn by turn.

The policy's own words are never tokenised again: decoding and encoding sampled ids need not give them back, and
log-probs belong to ids. So a later turn extends the ids that were sampled, and only the environment's words go through
the tokenizer. What a chat template writes between two turns comes out of a difference: the conversation is rendered
twice, with two different completions in the assistant's place; what both have in common behind it is what follows a
completion, end-of-turn token included.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ductile.tasks.left_out import LeftOut, RendersChat, refuse_left_out, refuse_unread

Messages = Sequence[Mapping[str, Any]]


class AppliesTemplate(RendersChat, Protocol):
    """A chat template with its tokenizer."""

    def control_token_in(self, messages: Messages) -> str | None: ...

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True, /, **variables: Any
    ) -> list[int]: ...


class ChatTokenizer(Protocol):
    """The part of `ductile.tasks.tokenizer.Tokenizer` that plays a conversation."""

    @property
    def chat_template(self) -> AppliesTemplate | None:
        """Turns messages into tokens; None for a base model, which reads plain text."""
        ...

    eos_token_ids: tuple[int, ...]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def first_turn(tokenizer: ChatTokenizer, messages: Messages, /, **variables: Any) -> list[int]:
    """Return the prompt. Without a chat template: the messages' texts, a line each, as a base model reads them.

    variables: of the chat template, `tools` among them. Raises LeftOut when the template drops a part of the messages.
    """
    template = tokenizer.chat_template
    if template is None:
        return tokenizer.encode("\n".join(_texts(messages, variables)))
    refuse_unread(template, variables)
    refuse_left_out(template, messages, True, **variables)
    return template.apply_chat_template(messages, **variables)


def next_turn(
    tokenizer: ChatTokenizer, first: Messages, completion: Sequence[int], reply: Messages, /, **variables: Any
) -> list[int]:
    """Return what comes between the sampled `completion` and the policy's next word: its end of turn, where it did not
    sample one, the environment's words, and the start of the policy's turn.

    first: the conversation's first messages, of which some templates make a preamble. Raises LeftOut as `first_turn`.
    """
    template = tokenizer.chat_template
    if template is None:
        return tokenizer.encode("".join(f"\n{text}" for text in _texts(reply, {})), add_special_tokens=False)
    refuse_left_out(template, [*first, SAID, *reply], True, **variables)
    between = after_completion(template, first, reply, True, **variables)
    if completion and completion[-1] in tokenizer.eos_token_ids:
        for end in (_end_of_turn(template, tokenizer.eos_token_ids, first, variables), between[:1]):
            if end[-1:] == [completion[-1]] and between[: len(end)] == end:
                return between[len(end) :]
    return between


SAID = {"role": "assistant", "content": "0"}
"""A completion, whichever."""


def _end_of_turn(
    template: AppliesTemplate, eos_token_ids: Sequence[int], first: Messages, variables: Mapping[str, Any]
) -> list[int]:
    """Return what the assistant's turn ends with, a token that ends generation last."""
    after = after_completion(template, first, [], False, **variables)
    for index, token in enumerate(after):
        if token in eos_token_ids:
            return after[: index + 1]
    return list(eos_token_ids[:1])


def _texts(messages: Messages, variables: Mapping[str, Any]) -> list[str]:
    """Return the contents, which are all that plain text can say."""
    if variables.get("tools") or any(message.get("tool_calls") for message in messages):
        raise LeftOut("tools and tool calls need a chat template, and the model's folder has none")
    return [str(message["content"]) for message in messages]


def after_completion(
    template: AppliesTemplate, first: Messages, reply: Messages, add_generation_prompt: bool, /, **variables: Any
) -> list[int]:
    """Return the tokens behind an assistant's completion that stands between `first` and `reply`."""
    a, b = (
        template.apply_chat_template(
            [*first, SAID | {"content": completion}, *reply], add_generation_prompt, **variables
        )
        for completion in ("0", "1")
    )
    num_common = 0
    for token_a, token_b in zip(reversed(a), reversed(b), strict=False):
        if token_a != token_b:
            break
        num_common += 1
    return a[len(a) - num_common :]
