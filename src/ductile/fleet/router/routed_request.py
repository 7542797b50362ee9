"""What a router must know of a request to find a server for it, and to ask another one when that fails."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic_core import from_json

COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
SESSION_HEADER = "x-session-id"
SESSION_FIELDS = ("prompt_cache_key", "user")
"""Fields of a body that name its session, where no header does: OpenAI's."""
MOST_SESSION_CHARS = 256
CHARS_A_TOKEN = 4
"""Characters of a token, to guess how long a text is."""
COMPLETION_TOKENS = 16
"""The default of OpenAI's completions; a chat has as many as there is room for."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    route: str
    content: bytes
    """The body, as the client sent it."""
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The same, read; empty where it is no JSON object: a server says what is wrong with it."""
    session: str = ""
    is_stream: bool = False
    num_prompts: int = 1
    num_sequences: int = 1
    num_prompt_tokens: int = 0
    """Estimate, from the length of what was sent."""
    max_tokens: int | None = None
    """Most tokens of each sequence; None where only the server knows."""

    @property
    def has_one_sequence(self) -> bool:
        return self.num_sequences == 1

    def with_fields(self, **fields: Any) -> bytes:
        """Return the body with some fields otherwise."""
        return json.dumps({**self.body, **fields}).encode()


def read_request(route: str, content: bytes, headers: Mapping[str, str]) -> RoutedRequest:
    try:
        # As the servers read it: it refuses what cannot be written again, and nests to a limit.
        body = from_json(content, allow_inf_nan=False)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return RoutedRequest(route, content, session=headers.get(SESSION_HEADER, "")[:MOST_SESSION_CHARS])
    known = cast("dict[str, Any]", body)
    prompts = _prompts(route, known)
    params = known.get("sampling_params")
    sampling = cast("dict[str, Any]", params) if route == TOKENS and isinstance(params, dict) else known
    default = None if route == CHAT else COMPLETION_TOKENS
    return RoutedRequest(
        route,
        content,
        known,
        session=_session(known, headers),
        is_stream=known.get("stream") is True,
        num_prompts=len(prompts),
        num_sequences=len(prompts) * _whole_number(sampling.get("n"), 1),
        num_prompt_tokens=sum(map(_num_tokens, prompts)),
        max_tokens=_whole_number(sampling.get("max_completion_tokens") or sampling.get("max_tokens"), default),
    )


def _prompts(route: str, body: Mapping[str, Any]) -> list[Any]:
    if route == CHAT:
        return [body.get("messages")]
    if route == TOKENS:
        return [body.get("token_ids")]
    prompt = body.get("prompt")
    is_single = not isinstance(prompt, list) or all(type(part) is int for part in cast("list[Any]", prompt))
    return [prompt] if is_single else cast("list[Any]", prompt)


def _num_tokens(prompt: Any) -> int:
    match prompt:
        case str():
            return len(prompt) // CHARS_A_TOKEN
        case [int(), *_]:
            return len(cast("list[int]", prompt))
        case list():  # messages
            return len(json.dumps(prompt)) // CHARS_A_TOKEN
        case _:
            return 0


def _session(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    named = (headers.get(SESSION_HEADER), *(body.get(name) for name in SESSION_FIELDS))
    return next((name[:MOST_SESSION_CHARS] for name in named if isinstance(name, str) and name), "")


def _whole_number(value: Any, default: Any) -> Any:
    return value if type(value) is int and 0 < value < 1 << 31 else default
