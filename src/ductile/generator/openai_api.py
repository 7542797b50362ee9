"""What the HTTP server understands: OpenAI's completions and chat, with vLLM's extensions, and vLLM's token endpoint.

A field that we do not offer is accepted at the value that changes nothing and refused at any other; an unknown field
is refused. Nothing that would change an answer is ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

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
"""Fields that say nothing about the answer."""

TokenIds = Annotated[list[int], Field(min_length=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_we_do_not_offer(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, neutral in NEUTRAL.items():
            if name in data and data[name] not in neutral:
                raise ValueError(f"{name} = {data[name]!r} is not offered by this server; leave it out")
        return {name: value for name, value in data.items() if name not in NEUTRAL and name not in IGNORED}


class SamplingFields(Body):
    """Null means the default, as clients send it."""

    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    def sampling(self, default_max_tokens: int, choice: int) -> Sampling:
        """Of choice number `choice`: each gets a seed of its own, or all would be the same."""
        top_k = self.top_k if self.top_k is not None else -1
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=top_k or -1,  # 0 means all, too
            min_p=self.min_p or 0.0,
            max_tokens=default_max_tokens if self.max_tokens is None else self.max_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            seed=None if self.seed is None else self.seed + choice,
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
        )


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class TextRequest(SamplingFields):
    """What completions and chat have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Put `prompt_token_ids` into the answer and `token_ids` into its choices."""
    return_tokens_as_token_ids: bool | None = None
    """Spell the tokens of `logprobs` "token_id:123"."""
    priority: int | None = None
    """vLLM's: the lower goes first."""


class CompletionRequest(TextRequest):
    prompt: list[str | list[int]]
    """In the body: a text, a list of token ids, or a list of either. Here always a list of prompts."""
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """0 and 1 both give the sampled token's; there are no alternatives."""
    add_special_tokens: bool | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _several(cls, prompt: Any) -> Any:
        several = prompt if isinstance(prompt, list) and not all(type(part) is int for part in prompt) else [prompt]
        for one in several:
            ids = isinstance(one, list) and all(type(part) is int for part in one)
            if not isinstance(one, str) and not ids:
                raise ValueError("must be a text, a list of token ids, or a list of these")
        return several


class ChatMessage(BaseModel):
    """Whatever else it has goes to the template as it is."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | list[dict[str, Any]] | None = None

    @field_validator("content")
    @classmethod
    def _join_parts(cls, content: str | list[dict[str, Any]] | None) -> str | None:
        """Content in parts becomes one text, which is what templates expect."""
        if not isinstance(content, list):
            return content
        for part in content:
            if part.get("type") != "text":
                raise ValueError(f"content of type {part.get('type')!r} is not understood; only 'text' is")
        return "".join(str(part.get("text", "")) for part in content)

    def for_template(self) -> dict[str, Any]:
        return {name: value for name, value in self.model_dump().items() if value is not None}


class ChatRequest(TextRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _of_the_template(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = sorted({"self", "messages", "add_generation_prompt"} & (variables or {}).keys())
        if taken:
            raise ValueError(f"{taken[0]} is no variable of the template's own; leave it out")
        return variables

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatRequest":
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self


class TokenSampling(SamplingFields):
    """`sampling_params` of the token endpoint."""

    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class TokenRequest(Body):
    """`POST /inference/v1/generate`: tokens in, tokens out."""

    model: str | None = None
    token_ids: TokenIds
    sampling_params: TokenSampling
    stream: Literal[False] | None = None
    priority: int | None = None
