"""A request on its way: its tokens so far, what of them is in the cache, and when it ends."""

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from ductile.columns import Floats, TokenIds, Versions
from ductile.generator.engine.kv_transfer import RequestKV
from ductile.generator.engine.logprob_report import LogprobReport
from ductile.generator.engine.text_stream import TextStream
from ductile.records import FinishReason, GenerateRequest, Generation


@dataclass(eq=False, slots=True)
class Sequence:
    request: GenerateRequest
    order: tuple[int, int]
    """(-priority, arrival): the smaller goes first."""
    stream: int
    """64-bit key of the sequence's random numbers (`ductile.generator.engine.sampler.stream_key`)."""
    max_len: int
    """Tokens of prompt and completion at which the sequence ends."""
    stop_ids: Collection[int]
    texts: Collection[TextStream] = ()
    """Streams that look for the stop strings; empty when there are none."""
    imported: RequestKV | None = None
    """KV cache that another engine computed of the sequence; None once it has blocks here or the weights changed."""
    report: LogprobReport | None = None
    """Log-probs that the client asks for beside those of the sampled tokens."""
    tokens: "array[int]" = field(init=False)
    """Tokens of the prompt, then of the completion."""
    logprobs: "array[float]" = field(init=False)
    versions: "array[int]" = field(init=False)
    blocks: list[int] = field(default_factory=list[int])
    keys: list[bytes] = field(default_factory=list[bytes])
    """Content keys of the sequence's full blocks, valid under `weights_serial`."""
    weights_serial: int = -1
    """Number of the weights that the first block was computed under, as the scheduler counts them; -1 when the sequence
    holds none."""
    num_registered: int = 0
    """Leading blocks that other sequences can find."""
    num_computed: int = 0
    """Leading tokens whose keys and values are in the cache, or will be when the scheduled step has run."""

    def __post_init__(self) -> None:
        request = self.request
        # Of 4 bytes a value, as columns have them: a column is made of them by copying.
        self.tokens = array("i", (request.prompt + request.generated).array.tobytes())
        self.logprobs = array("f", request.logprobs.array.tobytes())
        self.versions = array("i", request.versions.array.tobytes())
        for text in self.texts if self.request.generated else ():
            text.push(list(self.request.generated), last=False)

    @property
    def num_generated(self) -> int:
        return len(self.versions)

    @property
    def num_pending(self) -> int:
        """Known tokens that are not computed: 1 while it decodes, more before its prefill is through."""
        return len(self.tokens) - self.num_computed

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose keys and values may come from elsewhere: the hidden states of the others are needed."""
        num_prompt = len(self.request.prompt)
        if self.report and self.report.with_prompt and len(self.report.prompt) < num_prompt - 1:
            return len(self.report.prompt)
        return len(self.tokens) - 1  # the next token is sampled from the last one's

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        for text in self.texts:
            text.push([token], last=False)

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence has ended; None while it goes on."""
        if (self.num_generated and self.tokens[-1] in self.stop_ids) or any(text.stopped for text in self.texts):
            return "stop"
        return "length" if len(self.tokens) >= self.max_len else None

    def so_far(self) -> GenerateRequest:
        """The request with which another engine can go on with the sequence."""
        token_ids, logprobs, versions = self._completion()
        return replace(self.request, generated=token_ids, logprobs=logprobs, versions=versions)

    def generation(self, reason: FinishReason) -> Generation:
        return Generation(self.request.id, *self._completion(), reason, self.request.digests)

    def _completion(self) -> tuple[TokenIds, Floats, Versions]:
        completion = self.tokens[len(self.request.prompt) :]
        return TokenIds(completion), Floats(self.logprobs), Versions(self.versions)
