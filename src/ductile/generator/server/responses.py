"""What the HTTP server says: whole responses and streamed chunks, for completions and for chat.

A `Choice` collects one sequence; a format (`Chat`, `TextCompletion`) knows how the API spells it.
"""

from collections.abc import Sequence
from typing import Any

from ductile.generator.engine.text_stream import TextStream
from ductile.generator.server.openai_api import ChatRequest, CompletionRequest, TextRequest
from ductile.generator.server.runner import Delta
from ductile.records import FinishReason, GenerateRequest
from ductile.tasks.tokenizer import Tokenizer

Json = dict[str, Any]


class Choice:
    def __init__(self, index: int, request: GenerateRequest, tokenizer: Tokenizer) -> None:
        self.index = index
        self.prompt = request.prompt
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        stop_ids = () if request.sampling.ignore_eos else tokenizer.eos_token_ids
        self._stream = TextStream(tokenizer.decode, request.sampling, (*stop_ids, *request.sampling.stop_token_ids))

    def push(self, delta: Delta) -> str:
        """Take what was generated; returns the text that it adds."""
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        text = self._stream.push(delta.token_ids, last=delta.finish_reason is not None)
        self.text += text
        return text


class _Spelling:
    def __init__(self, body: TextRequest, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._with_ids = bool(body.return_token_ids)

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.decode([token_id], False)

    def _entry(
        self, index: int, said: Json, logprobs: Json | None, ended: FinishReason | None, **ids: Sequence[int]
    ) -> Json:
        lists = {name: list(each) for name, each in ids.items()} if self._with_ids else {}
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": ended} | lists


class Chat(_Spelling):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer) -> None:
        super().__init__(body, tokenizer)
        self._with_logprobs = bool(body.logprobs)

    def whole(self, choice: Choice) -> Json:
        """The entry of a whole response."""
        said = {"message": {"role": "assistant", "content": choice.text}}
        logprobs = self._logprobs(choice.token_ids, choice.logprobs)
        return self._entry(choice.index, said, logprobs, choice.finish_reason, token_ids=choice.token_ids)

    def piece(self, choice: Choice, text: str, delta: Delta) -> Json:
        """The entry of a streamed chunk."""
        said, logprobs = {"delta": {"content": text}}, self._logprobs(delta.token_ids, delta.logprobs)
        return self._entry(choice.index, said, logprobs, delta.finish_reason, token_ids=delta.token_ids)

    def opening(self, choice: Choice) -> Json:
        """The entry of the chunk before the first token."""
        return self._entry(choice.index, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> Json | None:
        if not self._with_logprobs:
            return None
        spelled = zip(map(self._token, token_ids), logprobs, strict=True)
        return {
            "content": [
                {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
                for token, logprob in spelled
            ]
        }


class TextCompletion(_Spelling):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer) -> None:
        super().__init__(body, tokenizer)
        self._with_logprobs = body.logprobs is not None
        self._with_top = body.logprobs == 1

    def whole(self, choice: Choice) -> Json:
        said, logprobs = {"text": choice.text}, self._logprobs(choice.token_ids, choice.logprobs, 0)
        ids = {"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt}
        return self._entry(choice.index, said, logprobs, choice.finish_reason, **ids)

    def piece(self, choice: Choice, text: str, delta: Delta) -> Json:
        logprobs = self._logprobs(delta.token_ids, delta.logprobs, len(choice.text) - len(text))
        return self._entry(choice.index, {"text": text}, logprobs, delta.finish_reason, token_ids=delta.token_ids)

    def opening(self, choice: Choice) -> None:
        """There is none: the first chunk has the first token."""

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[float], offset: int) -> Json | None:
        if not self._with_logprobs:
            return None
        tokens = [self._token(token_id) for token_id in token_ids]
        offsets: list[int] = []
        for token_id in token_ids:
            offsets.append(offset)
            offset += len(self._tokenizer.decode([token_id], False))
        top = [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)]
        return {
            "tokens": tokens,
            "token_logprobs": list(logprobs),
            "top_logprobs": top if self._with_top else None,
            "text_offset": offsets,
        }


Format = Chat | TextCompletion


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> Json:
    """Choices of one prompt count it once, as they share it."""
    prompt = sum(map(len, prompts))
    completion = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error(message: str, type: str = "invalid_request_error", param: str | None = None, code: str | None = None) -> Json:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}
