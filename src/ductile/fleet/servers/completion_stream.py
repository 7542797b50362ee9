"""One request as an OpenAI-compatible server takes it (`/v1/completions` with token ids as the prompt and
`return_token_ids`, as vLLM and `ductile inference` offer them), and the pieces that its response comes in.

Text would have to be tokenised again, and then log-probs would not be the tokens'.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, get_args

import msgspec

from ductile.columns import Floats, TokenIds, Versions
from ductile.messages.updates import Digest
from ductile.records import FinishReason, GenerateRequest, Generation, both_digests
from ductile.roles import Interrupted, Refused

ROUTE = "/v1/completions"
SEEDS, INT32 = 1 << 62, 1 << 31
LARGEST_LOGPROB = 1e-3
"""A log-prob that is above 0 by no more than this is rounded."""


class NoTokens(Refused):
    """A server sent what no model samples. Nothing that it says can be trained on."""


def as_prompt(request: GenerateRequest) -> GenerateRequest:
    """Return the request as a server can go on with it that does not know `num_generated`: it sees a prompt in what was
    generated, and no stop string there. One that has begun in the last tokens would be missed, so these are sampled
    again."""
    longest = max((len(stop.encode()) for stop in request.sampling.stop), default=1)
    kept = max(0, len(request.generated) - (longest - 1))  # a token has a byte at least
    return replace(
        request,
        generated=request.generated[:kept],
        logprobs=request.logprobs[:kept],
        versions=request.versions[:kept],
    )


def completion_body(request: GenerateRequest, model: str, goes_on: bool) -> dict[str, Any]:
    """Return the request's body. All of sampling is said, or a server may take what the model's generation_config.json
    says. goes_on: the server understands `num_generated`, so that seed and stop strings go on; another one gives no
    log-probs for 0 likely tokens, either."""
    sampling, num_generated = request.sampling, len(request.generated)
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.prompt + request.generated),
        "max_tokens": sampling.max_tokens - num_generated,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "logprobs": 0 if goes_on else 1,
        "return_token_ids": True,
    }
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if num_generated and goes_on:
        body["num_generated"] = num_generated
    if sampling.seed is not None:
        body["seed"] = sampling.seed
        if num_generated and not goes_on:  # its stream begins anew: the same numbers may not come twice
            body["seed"] = (sampling.seed * 1_000_003 + num_generated) % SEEDS
    if request.priority:
        body["priority"] = -request.priority  # vLLM's: the lower goes first
    return body


class SampledSpan(msgspec.Struct, frozen=True, array_like=True):
    """Weights that so many tokens in a row were sampled from."""

    version: int
    digest: Digest
    count: Annotated[int, msgspec.Meta(ge=0)]


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float] = []


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[SampledSpan] | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class StreamedPiece:
    """Tokens that have come. spans: empty where the server does not say which weights they are from."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[SampledSpan]
    finish_reason: FinishReason | None
    incarnation: str


def read_piece(event: Mapping[str, Any], url: str) -> StreamedPiece:
    """Return what an event of a completion brings. Raises Interrupted where it says that the server failed, or cannot
    be read, and NoTokens where its tokens, log-probs and weights do not belong together."""
    if "error" in event:
        raise Interrupted(f"{url} failed at a request: {str(event['error'])[:500]}")
    try:
        chunk = msgspec.convert(event, _Chunk)
    except msgspec.ValidationError as error:
        raise Interrupted(f"{url} sent an event that is none of a completion: {error}") from None
    choice = chunk.choices[0] if chunk.choices else _Choice(token_ids=[])
    token_ids, logprobs = choice.token_ids, choice.logprobs.token_logprobs if choice.logprobs else []
    spans = choice.weight_versions or []
    if token_ids is None and choice.finish_reason and not logprobs:
        token_ids = []  # a last chunk may have no more than the reason
    if token_ids is None or (token_ids and choice.logprobs is None):
        raise Interrupted(
            f"{url} gave no token ids with log-probs; the server must understand `return_token_ids` and `logprobs`"
        )
    if len(token_ids) != len(logprobs):
        raise NoTokens(f"{url} sent {len(token_ids)} tokens with {len(logprobs)} log-probs")
    if spans and (known := sum(span.count for span in spans)) != len(token_ids):
        raise NoTokens(f"{url} sent {len(token_ids)} tokens, and says the weights of {known}")
    reason = next((each for each in get_args(FinishReason) if each == choice.finish_reason), None)
    if choice.finish_reason and reason is None:
        raise Interrupted(f"{url} ended a completion for a reason that nobody knows: {choice.finish_reason[:80]!r}")
    return StreamedPiece(token_ids, logprobs, spans, reason, chunk.incarnation)


def strange_token(piece: StreamedPiece, vocab_size: int | None) -> str:
    """Return what is no sampled token, for a sentence; "" where all are some. A trainer that is given one fails, and
    takes the run with it."""
    for token_id in piece.token_ids:
        if not 0 <= token_id < (vocab_size or INT32):
            return f"the token id {token_id}, and the model's are from 0 to {(vocab_size or INT32) - 1}"
    for logprob in piece.logprobs:
        if not math.isfinite(logprob) or logprob > LARGEST_LOGPROB:
            return f"the log-prob {logprob}, and the logarithm of a probability is finite and at most 0"
    for span in piece.spans:
        if not 0 <= span.version < INT32:
            return f"tokens of version {span.version}, which no weights have"
    return ""


@dataclass(slots=True, eq=False)
class PartialCompletion:
    """A request, and what has come of its completion."""

    asked: GenerateRequest
    goes_on: bool
    """The server understands `num_generated`."""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    digests: dict[int, Digest] = field(default_factory=dict[int, Digest])
    request: GenerateRequest = field(init=False)
    """The request as the server gets it."""

    def __post_init__(self) -> None:
        self.request = self.asked if self.goes_on else as_prompt(self.asked)

    def __len__(self) -> int:
        """Return the number of the completion's tokens, those that the request began with included."""
        return len(self.request.generated) + len(self.token_ids)

    @property
    def reason_to_end(self) -> FinishReason | None:
        """Reason for which nothing is left to be sampled, though no server has said so; None where something is."""
        sampling = self.request.sampling
        if self.token_ids and self.token_ids[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(self) >= sampling.max_tokens else None

    def add(self, piece: StreamedPiece, version: int, url: str, vocab_size: int | None = None) -> None:
        """Take a piece. version: of the tokens that the piece does not say the version of. vocab_size: of the run's
        model; None: it is not known. Raises NoTokens."""
        if len(self) + len(piece.token_ids) > self.request.sampling.max_tokens:
            raise NoTokens(f"{url} sent more than the {self.request.sampling.max_tokens} tokens it was asked for")
        if why := strange_token(piece, vocab_size):
            raise NoTokens(f"{url} sent {why}")
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        for span in piece.spans or [SampledSpan(version, "", len(piece.token_ids))]:
            self.versions += [span.version] * span.count
            if span.count:
                self.digests = both_digests(self.digests, {span.version: span.digest})

    def so_far(self) -> GenerateRequest:
        """Return the request as another instance can go on with it, with no fewer tokens than it came with."""
        if len(self) <= len(self.asked.generated):
            return self.asked
        return self._whole()

    def _whole(self) -> GenerateRequest:
        request = self.request
        return replace(
            request,
            generated=request.generated + TokenIds(self.token_ids),
            logprobs=request.logprobs + Floats(self.logprobs),
            versions=request.versions + Versions(self.versions),
            digests=both_digests(request.digests, self.digests),
        )

    def ended(self, reason: FinishReason) -> Generation:
        whole = self._whole()
        return Generation(whole.id, whole.generated, whole.logprobs, whole.versions, reason, whole.digests)
