"""What the HTTP server understands: OpenAI's completions and chat, with vLLM's extensions, and vLLM's token endpoint.

A field that we do not offer is accepted at the value that changes nothing and refused at any other; an unknown field
is refused. Nothing that would change a response is ignored.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ductile.config.checks.generation import RESERVED_VARIABLES
from ductile.config.reading.errors import did_you_mean, show
from ductile.core.rollouts.sampling_limits import MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS, MAX_STOPS
from ductile.records import Sampling

NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "min_tokens": (None, 0),
    "prompt_logprobs": (None,),
    "top_logprobs": (None, 0),
    "include_stop_str_in_output": (None, False),
    "continue_final_message": (None, False),
    "truncate_prompt_tokens": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "documents": (None, []),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "features": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
}
"""Fields of the two APIs that we know, and the values that ask for nothing."""

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "spaces_between_special_tokens",
        "detokenize",
        "output_kind",
        "cache_salt",
        "request_id",
    }
)
"""Fields that say nothing about the response."""

Number = Annotated[float, Field(allow_inf_nan=False)]
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Whole number of 64 bits, as all whole numbers below are."""

MAX_CHOICES = 1024
"""Most choices of one prompt."""


def _sampled_only(logprobs: Any) -> Any:
    if type(logprobs) is int and logprobs not in (0, 1):
        raise ValueError(f"logprobs is {show(logprobs)}; it must be 0 or 1: only the sampled tokens' are offered")
    return logprobs


Logprobs = Annotated[int | None, BeforeValidator(_sampled_only)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_we_do_not_offer(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.model_fields.keys() | NEUTRAL.keys() | IGNORED
        for name in data.keys() - known:
            near = did_you_mean(name[:80], known)
            raise PydanticCustomError("unknown_field", "", {"name": name[:80], "near": near})
        for name, neutral in NEUTRAL.items():
            if name in data and data[name] not in neutral:
                raise ValueError(f"{name} = {show(data[name])} is not offered by this server; leave it out")
        return {name: value for name, value in data.items() if name not in NEUTRAL and name not in IGNORED}


class SamplingFields(Body):
    """Sampling as a body gives it. Null means the default, as clients send it."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = None
    min_p: Number | None = None
    max_tokens: Int | None = None
    seed: Annotated[Int, Field(lt=2**63 - MAX_CHOICES)] | None = None
    """Choice number k of a prompt gets the seed plus k."""
    stop: list[str] | None = None
    """Stop strings. The body may also give a single text."""
    stop_token_ids: Annotated[list[Int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _several_stops(cls, stop: Any) -> Any:
        stops = [stop] if isinstance(stop, str) else stop
        if stops is None or (isinstance(stops, list) and all(isinstance(one, str) for one in stops)):
            if stops and (len(stops) > MAX_STOPS or max(map(len, stops)) > MAX_STOP_CHARS):
                raise ValueError(f"stop may hold at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters each")
            return stops
        raise ValueError(f"stop is {show(stop)}; it must be a text or a list of texts")

    def with_defaults(self, defaults: Mapping[str, float]) -> Self:
        """Return the body with these values in the place of those that it does not say."""
        said = self.model_dump(include=set(defaults), exclude_none=True)
        return self.model_copy(update={name: value for name, value in defaults.items() if name not in said})

    def sampling(self, default_max_tokens: int) -> Sampling:
        """The sampling of choice 0 of a prompt."""
        top_k = self.top_k if self.top_k is not None else -1
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=top_k or -1,  # 0 means all, too
            min_p=self.min_p or 0.0,
            max_tokens=default_max_tokens if self.max_tokens is None else self.max_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop=tuple(self.stop or ()),
            seed=self.seed,
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
        )


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class TextRequest(SamplingFields):
    """Fields that the bodies of completions and chat have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Put `prompt_token_ids` into the response and `token_ids` into its choices."""
    return_tokens_as_token_ids: bool | None = None
    """Spell the tokens of `logprobs` "token_id:123"."""
    priority: Int | None = None
    """Priority as in vLLM: requests with a lower number go first."""


class CompletionRequest(TextRequest):
    prompt: list[str | list[int]]
    """Prompts, each a text or a list of token ids. The body may also give a single one."""
    logprobs: Logprobs = None
    """0 and 1 both ask for the sampled tokens' log-probs; alternatives are not offered."""
    add_special_tokens: bool | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _several(cls, prompt: Any) -> Any:
        several = prompt if isinstance(prompt, list) and not all(type(part) is int for part in prompt) else [prompt]
        for one in several:
            ids = isinstance(one, list) and all(type(part) is int for part in one)
            if not isinstance(one, str) and not ids:
                raise ValueError(
                    f"prompt is {show(prompt)}; it must be a text, a list of token ids, or a list of these"
                )
        return several


class ChatMessage(BaseModel):
    """A message of a chat. Fields besides these go to the template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | None = None
    """Text of the message. The body may also give a list of parts that are texts."""

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        """Content in parts becomes one text, which is what templates expect."""
        if content is None or isinstance(content, str):
            return content
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise ValueError(f"content is {show(content)}; it must be a text or a list of parts")
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text", ""), str):
                raise ValueError(f'a part of the content is {show(part)}; it must be {{"type": "text", "text": "..."}}')
        return "".join(part.get("text", "") for part in content)

    def for_template(self) -> dict[str, Any]:
        return {name: value for name, value in self.model_dump().items() if value is not None}


class ChatRequest(TextRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _of_the_template(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = sorted(RESERVED_VARIABLES & (variables or {}).keys())
        if taken:
            raise ValueError(f"chat_template_kwargs may not hold {taken[0]}, which the request gives by itself")
        return variables

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatRequest":
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self


class TokenSampling(SamplingFields):
    """`sampling_params` of the token endpoint."""

    logprobs: Logprobs = None


class TokenRequest(Body):
    """`POST /inference/v1/generate`: tokens in, tokens out."""

    model: str | None = None
    token_ids: Annotated[list[int], Field(min_length=1), FailFast()]
    sampling_params: TokenSampling
    stream: Literal[False] | None = None
    priority: Int | None = None
