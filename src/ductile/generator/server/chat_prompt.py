"""A chat as the text that the model goes on from: its template's, with all that the client wrote in it."""

from collections.abc import Mapping, Sequence
from typing import Any

from ductile.generator.server.openai_api import ChatRequest
from ductile.generator.server.request_body import BadBody
from ductile.tasks.chat_template import OPEN
from ductile.tasks.left_out import LeftOut, refuse_left_out, refuse_unread
from ductile.tasks.messages import TemplateMessage
from ductile.tasks.tokenizer import Tokenizer

HINTS = ("reasoning_effort", "verbosity")
"""Fields of a request that are variables of some templates, and say nothing to others."""


def render_prompt(tokenizer: Tokenizer, body: ChatRequest) -> str:
    """Return the text. Raises BadBody where a word of the request would be missing in it, and TokenizerError."""
    try:
        messages = body.conversation()
    except ValueError as problem:
        raise BadBody(str(problem), "messages") from None
    variables = _variables(tokenizer, body)
    with_prompt = body.add_generation_prompt is not False and not body.continue_final_message
    try:
        refuse_unread(tokenizer, body.chat_template_kwargs or {})
    except LeftOut as problem:
        raise BadBody(str(problem), "chat_template_kwargs") from None
    try:
        refuse_left_out(tokenizer, messages, with_prompt, **variables)
    except LeftOut as problem:
        raise BadBody(str(problem), "tools" if problem.place is None else f"messages.{problem.place}") from None
    if body.continue_final_message:
        return _open_end(tokenizer, messages, variables)
    return tokenizer.render_chat(messages, with_prompt, **variables)


def _variables(tokenizer: Tokenizer, body: ChatRequest) -> dict[str, Any]:
    given = {"reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity}
    variables: dict[str, Any] = {
        name: given[name] for name in HINTS if given[name] is not None and tokenizer.reads(name)
    }
    if body.tools and body.tool_choice != "none":
        variables["tools"] = [tool.as_given() for tool in body.tools]
    return variables | (body.chat_template_kwargs or {})


def _open_end(tokenizer: Tokenizer, messages: Sequence[TemplateMessage], variables: Mapping[str, Any]) -> str:
    """Return the conversation up to the last word of its last message."""
    *before, last = messages
    marked = {**last, "content": f"{last.get('content', '')}{OPEN}"}
    text, mark, _ = tokenizer.render_chat([*before, marked], False, **variables).rpartition(OPEN)
    if last["role"] != "assistant" or not mark:
        raise BadBody(
            f"continue_final_message is true, and the last message's role is {last['role']}; "
            "it must be an assistant's, with content",
            "continue_final_message",
        )
    return text
