"""A streamed response with one choice, in such a way that another server can go on with it.

The servers are asked for token ids (`return_token_ids`), whether the client wants them or not. When a server is lost,
another one is asked for a completion of the prompt's tokens and those that came (`num_generated`), with the rest of the
client's limit, and what it sends is written as the client's stream was begun.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from ductile.fleet.router.routed_request import CHAT, COMPLETIONS, RoutedRequest

SAMPLING_FIELDS = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("skip_special_tokens", "priority", "cache_salt", "stream_options", "return_tokens_as_token_ids"),
)
"""Fields of a chat that mean the same for a completion."""

StreamEvent = dict[str, Any]


class StreamFailed(Exception):
    """A server says in a stream that it has failed. The text is its own."""


class PartialStream:
    def __init__(self, request: RoutedRequest, max_model_len: Callable[[], int]) -> None:
        """max_model_len: bounds a chat that says no `max_tokens`."""
        self._request, self._max_model_len = request, max_model_len
        self._wants_ids = request.body.get("return_token_ids") is True
        self._before = int(request.body.get("num_generated") or 0)
        self._prompt_ids: list[int] | None = None
        self._token_ids: list[int] = []
        self._num_chars = self._num_chars_before = 0
        """Characters of the text that have come, and those of them that were there when the latest server was asked."""
        self._head: StreamEvent = {}
        """Fields of the first chunk that are the same in all others."""
        self._goes_on = False
        """True once another server than the first one has been asked."""
        self.finish_reason: str | None = None
        self.is_aborted = False
        """True where the server has ended the choice before its time, as it is leaving."""

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        most = self._request.max_tokens
        if most is None:
            most = self._max_model_len() - len(self._prompt_ids or ())
        return most - len(self._token_ids)

    def next_body(self, **fields: Any) -> tuple[str, bytes]:
        """Return the route and the body by which a server begins the response, or goes on with it. fields: that the
        body has besides."""
        request, prompt = self._request, self._prompt_ids
        self.is_aborted = False
        if prompt is None:
            return request.route, request.with_fields(return_token_ids=True, **fields)
        self._goes_on, self._num_chars_before = True, self._num_chars
        body = request.body
        if request.route == CHAT:
            body = {name: body[name] for name in SAMPLING_FIELDS if name in body}
        going_on = {
            "prompt": [*prompt, *self._token_ids],
            "num_generated": self._before + len(self._token_ids),
            "max_tokens": max(1, self.num_left),
            "stream": True,
            "return_token_ids": True,
        }
        return COMPLETIONS, json.dumps({**body, **going_on, **fields}).encode()

    def take(self, event: StreamEvent) -> StreamEvent:
        """Take a chunk, and return it as the client is to see it. Raises StreamFailed."""
        if "error" in event:
            said = event["error"]
            message = cast("Mapping[str, Any]", said).get("message") if isinstance(said, dict) else said
            raise StreamFailed(str(message)[:500])
        prompt_ids = event.pop("prompt_token_ids", None)
        is_first = not self._head
        if is_first:
            self._head = {name: event[name] for name in ("id", "created", "object") if name in event}
        if self._prompt_ids is None:
            self._prompt_ids = prompt_ids
        shown = event | self._head
        if is_first and self._wants_ids and prompt_ids is not None:
            shown["prompt_token_ids"] = prompt_ids
        if choices := event.get("choices"):
            shown["choices"] = [self._choice(choices[0])]
        elif self._goes_on and event.get("usage"):
            shown["usage"] = self.usage()
        return shown

    def usage(self) -> dict[str, int]:
        prompt, completion = len(self._prompt_ids or ()), len(self._token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def last_chunks(self) -> list[StreamEvent]:
        """Return what a server that was lost after its last token would have sent."""
        chunks: list[StreamEvent] = []
        if self.finish_reason is None:
            self.finish_reason = "length"
            said: StreamEvent = {"delta": {}} if self._request.route == CHAT else {"text": ""}
            chunks.append(self._head | {"choices": [{"index": 0, **said, "logprobs": None, "finish_reason": "length"}]})
        options = self._request.body.get("stream_options")
        if isinstance(options, dict) and cast("StreamEvent", options).get("include_usage"):
            chunks.append(self._head | {"choices": [], "usage": self.usage()})
        return chunks

    def _choice(self, choice: StreamEvent) -> StreamEvent:
        self._token_ids += cast("list[int]", choice.get("token_ids") or [])
        if choice.get("finish_reason") == "abort":
            self.is_aborted = True
            choice["finish_reason"] = None
        self.finish_reason = choice.get("finish_reason")
        if not self._wants_ids:
            for name in ("token_ids", "weight_versions"):
                choice.pop(name, None)
        text = choice.get("text")
        if self._goes_on and (logprobs := choice.get("logprobs")) and "text_offset" in logprobs:
            logprobs["text_offset"] = [self._num_chars_before + offset for offset in logprobs["text_offset"]]
        if isinstance(text, str):
            self._num_chars += len(text)
            if self._request.route == CHAT:
                choice["delta"] = {"content": choice.pop("text")}
        return choice


def can_be_carried(request: RoutedRequest) -> bool:
    """Return whether another server can go on with the response to a request, once a part of it is with the client."""
    body = request.body
    if not request.is_stream or not request.has_one_sequence or body.get("echo"):
        return False
    if request.route == CHAT:
        return not (body.get("tools") or body.get("logprobs"))
    return request.route == COMPLETIONS
