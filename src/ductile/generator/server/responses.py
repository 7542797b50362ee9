"""Responses of the HTTP server: whole responses and streamed chunks, for completions and for chat.

A format (`Chat`, `TextCompletion`) knows how the API spells a `Choice`.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from ductile.generator.server.choice import Called, Choice, ChoiceDelta, ScoredToken
from ductile.generator.server.openai_api import ChatRequest, CompletionRequest, TextRequest
from ductile.generator.server.runner import WeightSpan
from ductile.tasks.token_bytes import token_text
from ductile.tasks.tokenizer import Tokenizer

Json = dict[str, Any]


class _Spelling:
    def __init__(self, body: TextRequest, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._with_ids = bool(body.return_token_ids)

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else token_text(self._bytes.of(token_id))

    def _entry(
        self, choice: Choice, said: Json, logprobs: Json | None, spans: Sequence[WeightSpan], **ids: Sequence[int]
    ) -> Json:
        lists: Json = {name: list(each) for name, each in ids.items()} if self._with_ids else {}
        if self._with_ids:
            lists["weight_versions"] = spans
        ended: Json = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return {"index": choice.index, **said, "logprobs": logprobs, **ended} | lists


class Chat(_Spelling):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer) -> None:
        super().__init__(body, tokenizer)

    def whole(self, choice: Choice) -> Json:
        """Return the entry of a whole response."""
        message: Json = {"role": "assistant", "content": choice.text}
        if choice.calls:
            message |= {"content": choice.text.strip() or None, "tool_calls": [_call(each) for each in choice.calls]}
        logprobs = self._logprobs(choice, choice.scored()) if choice.report else None
        return self._entry(choice, {"message": message}, logprobs, choice.spans, token_ids=choice.token_ids)

    def piece(self, choice: Choice, piece: ChoiceDelta) -> Json:
        """Return the entry of a streamed chunk."""
        delta: Json = {"content": piece.text}
        if piece.calls:
            delta["tool_calls"] = [{"index": each.index, **_call(each)} for each in piece.calls]
        logprobs = self._logprobs(choice, choice.scored(piece.start)) if choice.report else None
        return self._entry(choice, {"delta": delta}, logprobs, piece.spans, token_ids=choice.token_ids[piece.start :])

    def opening(self, choice: Choice) -> Json:
        """Return the entry of the chunk before the first token."""
        said: Json = {"delta": {"role": "assistant", "content": ""}}
        return {"index": choice.index, **said, "logprobs": None, "finish_reason": None}

    def _logprobs(self, choice: Choice, scored: Iterable[ScoredToken]) -> Json:
        return {
            "content": [
                self._entry_of(token.token_id, token.logprob, token.shown)
                | {
                    "top_logprobs": [
                        self._entry_of(token_id, logprob, choice.shown(token_id, token.first))
                        for token_id, logprob in token.likeliest
                    ]
                }
                for token in scored
            ]
        }

    def _entry_of(self, token_id: int, logprob: float | None, shown: bytes) -> Json:
        return {"token": self._token(token_id), "logprob": logprob, "bytes": list(shown)}


class TextCompletion(_Spelling):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer) -> None:
        super().__init__(body, tokenizer)
        self._echo, self._with_top = bool(body.echo), bool(body.logprobs)

    def whole(self, choice: Choice) -> Json:
        logprobs = None
        if choice.report:
            prompt = choice.scored_prompt() if self._echo else ()
            logprobs = self._logprobs([*prompt, *choice.scored()])
        ids = {"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt}
        return self._entry(choice, {"text": choice.text}, logprobs, choice.spans, **ids)

    def piece(self, choice: Choice, piece: ChoiceDelta) -> Json:
        logprobs = self._logprobs(list(choice.scored(piece.start))) if choice.report else None
        return self._entry(
            choice, {"text": piece.text}, logprobs, piece.spans, token_ids=choice.token_ids[piece.start :]
        )

    def opening(self, choice: Choice) -> Json | None:
        """Return the echo, where one is asked for; else there is none: the first chunk has the first token."""
        if not self._echo:
            return None
        logprobs = self._logprobs(list(choice.scored_prompt())) if choice.report else None
        return {"index": choice.index, "text": choice.echoed, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json:
        return {
            "tokens": [self._token(token.token_id) for token in scored],
            "token_logprobs": [token.logprob for token in scored],
            "top_logprobs": [self._top(token) for token in scored] if self._with_top else None,
            "text_offset": [token.offset for token in scored],
        }

    def _top(self, token: ScoredToken) -> dict[str, float] | None:
        """Return the likeliest tokens and the one in their place, as vLLM has them. Of two that are spelled alike the
        likelier counts."""
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in (*token.likeliest, (token.token_id, token.logprob)):
            top.setdefault(self._token(token_id), logprob)
        return top


Format = Chat | TextCompletion


def _call(called: Called) -> Json:
    arguments = json.dumps(called.call.arguments, ensure_ascii=False)
    return {"id": called.id, "type": "function", "function": {"name": called.call.name, "arguments": arguments}}


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> Json:
    """Return the numbers of tokens. Choices of one prompt count it once, as they share it."""
    prompt = sum(map(len, prompts))
    completion = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
