"""One sequence of a response as it grows: its text, its calls of tools, and what its tokens add to the text."""

import codecs
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ductile.generator.engine.logprob_report import Likeliest, LogprobReport
from ductile.generator.engine.text_stream import TextStream
from ductile.generator.server.runner import Delta, WeightSpan
from ductile.records import FinishReason, GenerateRequest
from ductile.tasks.tokenizer import Tokenizer
from ductile.tasks.tool_calls import CallStream, ToolCall


@dataclass(frozen=True, slots=True)
class Asked:
    """Wishes of a client for each choice, besides the completion's text."""

    num_likeliest: int | None = None
    """Likeliest tokens at each place; None: no log-probs."""
    echo: bool = False
    """True where the prompt is part of the choice."""
    only_echo: bool = False
    """True where there is to be no completion."""
    num_generated: int = 0
    """Tokens at the prompt's end that were generated for the choice before."""
    calls: Callable[[], CallStream] | None = None
    """Makes what tells calls of tools from text."""
    one_call: bool = False
    """True where calls after the first are left out."""


@dataclass(frozen=True, slots=True)
class Called:
    """A call of a tool, under the id by which its result refers to it: nine characters, as some templates want it."""

    index: int
    call: ToolCall
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token of a choice, and those that were likely in its place."""

    token_id: int
    logprob: float | None
    """None for the first token, which nothing precedes."""
    shown: bytes
    """Text that the token adds."""
    likeliest: Likeliest
    offset: int
    """Characters of the choice's text before it."""
    first: bool
    """True where nothing is shown before it."""


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """Growth of a choice."""

    text: str
    calls: list[Called]
    start: int
    """Place of its first token in the completion."""
    spans: list[WeightSpan]
    """Weights that its tokens were sampled from."""


class Choice:
    def __init__(self, index: int, request: GenerateRequest, tokenizer: Tokenizer, asked: Asked | None = None) -> None:
        self.asked = asked or Asked()
        self.index = index
        self.prompt = request.prompt
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[WeightSpan] = []
        """Weights that the tokens were sampled from, in order."""
        self.completion = ""
        self.calls: list[Called] = []
        self.finish_reason: FinishReason | Literal["tool_calls"] | None = None
        num_likeliest = self.asked.num_likeliest
        self.report = None if num_likeliest is None else LogprobReport(num_likeliest, self.asked.echo)
        self._tokenizer, self._sampling = tokenizer, request.sampling
        self._eos_ids = () if request.sampling.ignore_eos else tokenizer.eos_token_ids
        self._call_stream = self.asked.calls() if self.asked.calls else None
        before = () if self.asked.echo else tuple(token for token in request.prompt if token not in self._hidden)
        self._stream = TextStream(lambda tokens, _: tokenizer.decode(tokens, False), request.sampling, prompt=before)
        self._echoed: str | None = None
        if request.generated:  # its text is the client's already; a stop string may have begun in it
            self._stream.push([token for token in request.generated if token not in self._hidden], False)
        self._begun, self._offset = bool(before), 0
        """Return whether one of the tokens so far shows anything, and how many characters they show."""
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, delta: Delta) -> ChoiceDelta:
        """Take what was generated."""
        last, start = delta.finish_reason is not None, len(self.token_ids)
        if self.asked.only_echo:
            self.finish_reason = "length" if last else None
            return ChoiceDelta("", [], start, [])
        if self.asked.echo:
            _ = self.echoed  # the completion goes on from it
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self._extend_spans(delta.spans)
        self.finish_reason = delta.finish_reason
        tokens = self.token_ids[start : len(self.token_ids) - self._ends_with_its_token]
        # Special tokens open and close calls.
        skipped = () if self._call_stream else self._hidden
        text, found = self._stream.push([token for token in tokens if token not in skipped], last), list[ToolCall]()
        if self._call_stream:
            text, found = self._call_stream.push(text, last)
            text = self._without_special(text)
        if self.asked.one_call:
            found = found[: 1 - len(self.calls)]
        calls = [Called(len(self.calls) + number, call) for number, call in enumerate(found)]
        self.completion += text
        self.calls += calls
        if self.calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        return ChoiceDelta(text, calls, start, delta.spans)

    def _extend_spans(self, spans: list[WeightSpan]) -> None:
        for version, digest, count in spans:
            if self.spans and self.spans[-1][:2] == (version, digest):
                self.spans[-1] = (version, digest, self.spans[-1][2] + count)
            else:
                self.spans.append((version, digest, count))

    @property
    def text(self) -> str:
        return self.echoed + self.completion

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or the token of `stop_token_ids` that ended the choice; None where an eos token did, or
        nothing of the kind."""
        if self.finish_reason not in ("stop", "tool_calls"):
            return None
        if self._stream.stopped_by is not None:
            return self._stream.stopped_by
        if self._ends_with_its_token:
            return None if self.token_ids[-1] in self._eos_ids else self.token_ids[-1]
        # One with special tokens in it, which are not shown.
        end = self._tokenizer.decode(self.token_ids[-2 * max(map(len, self._sampling.stop), default=0) :], False)
        return next((stop for stop in self._sampling.stop if stop in end), None)

    @property
    def echoed(self) -> str:
        """The prompt's text, where it is part of the choice."""
        if self._echoed is None:
            visible = list(self.prompt[self._num_added() :]) if self.asked.echo else []
            self._echoed = self._stream.follow(visible) if visible else ""
        return self._echoed

    def scored_prompt(self) -> Iterator[ScoredToken]:
        """The prompt's tokens, once all their log-probs are known."""
        assert self.report is not None
        scored: list[tuple[float | None, Likeliest]] = [(None, []), *self.report.prompt]
        num_added = self._num_added()
        for number, (token_id, (logprob, likeliest)) in enumerate(zip(self.prompt, scored, strict=True)):
            yield self._score(token_id, logprob, likeliest, number < num_added)

    def scored(self, start: int = 0) -> Iterator[ScoredToken]:
        """Return the completion's tokens from `start` on; each is asked for once, and in order."""
        assert self.report is not None
        for number in range(start, len(self.token_ids)):
            hidden = self.token_ids[number] in self._hidden
            hidden |= number == len(self.token_ids) - 1 and self._ends_with_its_token
            yield self._score(self.token_ids[number], self.logprobs[number], self.report.completion[number], hidden)

    def shown(self, token_id: int, first: bool) -> bytes:
        """Return what another token would have added."""
        return b"" if token_id in self._hidden else self._tokenizer.token_bytes.of(token_id, first)

    def _score(self, token_id: int, logprob: float | None, likeliest: Likeliest, hidden: bool) -> ScoredToken:
        first = not self._begun
        shown = b"" if hidden else self._tokenizer.token_bytes.of(token_id, first)
        offset = self._offset
        self._begun |= not hidden
        self._offset += len(self._characters.decode(shown))
        return ScoredToken(token_id, logprob, shown, likeliest, offset, first)

    @property
    def _hidden(self) -> frozenset[int]:
        return self._tokenizer.token_bytes.special_ids if self._sampling.skip_special_tokens else frozenset()

    @property
    def _ends_with_its_token(self) -> bool:
        """Return whether it ended with a token, which is not shown."""
        return (
            self.finish_reason in ("stop", "tool_calls")
            and bool(self.token_ids)
            and self.token_ids[-1] in (*self._eos_ids, *self._sampling.stop_token_ids)
        )

    def _num_added(self) -> int:
        """Return the number of tokens at the prompt's beginning that the tokenizer adds to any text."""
        added = self._tokenizer.encode("")
        return len(added) if list(self.prompt[: len(added)]) == added else 0

    def _without_special(self, text: str) -> str:
        for token in self._hidden:
            if (spelled := self._tokenizer.token_bytes.of(token).decode(errors="replace")) and spelled in text:
                text = text.replace(spelled, "")
        return text
