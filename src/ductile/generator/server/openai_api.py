"""Requests that the HTTP server understands: OpenAI's completions and chat, with vLLM's extensions, and vLLM's token
endpoint.

A field that we do not offer is accepted at the value that changes nothing and refused at any other; an unknown field
is refused. Nothing that would change a response is ignored. Null is the same as leaving a field out.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ductile.config.reading.errors import did_you_mean, show
from ductile.core.rollouts.sampling_limits import MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS, MAX_STOPS, RESERVED_VARIABLES
from ductile.generator.server.kv_params import KVTransferParams
from ductile.records import Sampling
from ductile.tasks.messages import BadMessage, TemplateMessage, for_template

NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "add_special_tokens": (False,),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "top_logprobs": (0,),
    "include_stop_str_in_output": (False,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "documents": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "features": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
}
"""Fields of the two APIs that we know, and the values besides null that ask for nothing. A body that has the field
takes others, too."""

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
        "reasoning_effort",
        "verbosity",
        "prediction",
        "include_obfuscation",
        "spaces_between_special_tokens",
        "detokenize",
        "output_kind",
        "cache_salt",
        "request_id",
    }
)
"""Fields that say nothing about the response: whose it is, where it is kept, and how it comes sooner."""

Number = Annotated[float, Field(allow_inf_nan=False)]
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Whole number of 64 bits, as all whole numbers below are."""

MAX_CHOICES = 1024
"""Most choices of one prompt."""


MAX_LOGPROBS = 20
"""Most likeliest tokens at each place; OpenAI's limit for chat, and vLLM's by default."""

MAX_TOOLS = 1024
"""Most tools of a request."""

NumLikeliest = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _sampled_only(logprobs: Any) -> Any:
    if type(logprobs) is int and logprobs not in (0, 1):
        raise ValueError(f"logprobs is {show(logprobs)}; it must be 0 or 1: only the sampled tokens' are offered")
    return logprobs


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_we_do_not_offer(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        taken = {name: value for name, value in data.items() if name in cls.model_fields}
        known = cls.model_fields.keys() | NEUTRAL.keys() | IGNORED
        for name in data.keys() - taken.keys() - IGNORED:
            value = data[name]
            if name not in NEUTRAL and value is not None:
                near = did_you_mean(name[:80], known)
                raise PydanticCustomError("unknown_field", "", {"name": name[:80], "near": near})
            if value is not None and value not in NEUTRAL[name]:
                raise ValueError(f"{name} = {show(value)} is not offered by this server; leave it out")
        return taken


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
            if not all(stops or ()):
                raise ValueError(f"stop is {show(stop)}; each of its texts must have at least one character")
            if stops and (len(stops) > MAX_STOPS or max(map(len, stops)) > MAX_STOP_CHARS):
                raise ValueError(f"stop may hold at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters each")
            return stops
        raise ValueError(f"stop is {show(stop)}; it must be a text or a list of texts")

    def with_defaults(self, defaults: Mapping[str, float]) -> Self:
        """Return the body with these values in the place of those that it does not say."""
        said = self.model_dump(include=set(defaults), exclude_none=True)
        return self.model_copy(update={name: value for name, value in defaults.items() if name not in said})

    def sampling(self, default_max_tokens: int) -> Sampling:
        """Return the sampling of choice 0 of a prompt."""
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
    include_obfuscation: bool | None = None
    """OpenAI's padding of chunks, against those who read along; nothing here is padded."""


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
    kv_transfer_params: KVTransferParams | None = None
    """Who computes the prompt, where that is not the server that goes on with it. A router says it."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Salt of the prefix cache, as in vLLM: requests of different salts share no keys and values."""


class CompletionRequest(TextRequest):
    prompt: list[str | list[int]]
    """Prompts, each a text or a list of token ids. The body may also give a single one."""
    logprobs: NumLikeliest | None = None
    """Asks for the sampled tokens' log-probs, and those of so many of the likeliest."""
    echo: bool | None = None
    """Put the prompt before each completion, with its log-probs if these are asked for."""
    add_special_tokens: bool | None = None
    num_generated: Annotated[int, Field(ge=0)] | None = None
    """So many tokens at the prompt's end were generated for this completion before, here or at another server (our
    extension): seed and stop strings go on from them. max_tokens counts those that are still to come."""

    @property
    def only_echo(self) -> bool:
        """Return whether the prompt is all that is asked for."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self, default_max_tokens: int) -> Sampling:
        """An echo alone samples one token, which is left out: the engine gives each sequence at least one."""
        sampling = super().sampling(default_max_tokens)
        return replace(sampling, max_tokens=1) if self.only_echo else sampling

    @model_validator(mode="after")
    def _some_tokens(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0; it must be 1 or more, or echo must be true")
        return self

    @model_validator(mode="after")
    def _goes_on(self) -> "CompletionRequest":
        if self.num_generated:
            prompt = self.prompt[0]
            if len(self.prompt) != 1 or isinstance(prompt, str) or (self.n or 1) != 1 or self.echo:
                raise ValueError(
                    f"num_generated is {self.num_generated}, which goes with one prompt of token ids, n = 1 and no echo"
                )
            if self.num_generated >= len(prompt):
                raise ValueError(
                    f"num_generated is {self.num_generated}, and the prompt has {len(prompt)} tokens; it must be fewer"
                )
        return self

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


class AsGiven(BaseModel):
    """A part of a request that templates write out: its keys stay in the client's order, as do a training row's."""

    model_config = ConfigDict(extra="allow", strict=True)
    _given: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        taken = handler(value)
        taken._given = value if isinstance(value, dict) else taken.model_dump(exclude_unset=True)
        return taken

    def as_given(self) -> dict[str, Any]:
        return self._given


class ChatMessage(AsGiven):
    """A message of a chat. `ductile.tasks.messages` knows what else is in it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]


class OfferedFunction(BaseModel):
    """A function that the model may call. All of it goes to the template."""

    model_config = ConfigDict(extra="allow", strict=True)
    name: Annotated[str, Field(min_length=1)]
    parameters: dict[str, Any] | None = None


class OfferedTool(AsGiven):
    type: Literal["function"]
    function: OfferedFunction


class ChatRequest(TextRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: NumLikeliest | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    """Use that the model may make of the tools; "none": it is not shown them."""
    parallel_tool_calls: bool | None = None
    """False: calls after the first are left out."""
    reasoning_effort: str | None = None
    verbosity: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Go on with the last message, which stays open."""
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _nothing_forced(cls, choice: Any) -> Any:
        if choice not in (None, "none", "auto"):
            raise ValueError(f'tool_choice is {show(choice)}; it must be "auto" or "none": no call can be forced here')
        return choice

    @field_validator("chat_template_kwargs")
    @classmethod
    def _of_the_template(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = sorted(RESERVED_VARIABLES & (variables or {}).keys())
        if taken:
            raise ValueError(f"chat_template_kwargs may not hold {taken[0]}, which the request gives by itself")
        return variables

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}, which goes with logprobs = true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt are both true; keep one of them")
        return self

    def conversation(self) -> list[TemplateMessage]:
        """Return the messages as templates take them. Raises ValueError, which names the message."""
        taken: list[TemplateMessage] = []
        for number, message in enumerate(self.messages):
            try:
                taken.append(for_template(message.as_given()))
            except BadMessage as problem:
                raise ValueError(f"messages.{number} {problem}") from None
        return taken


class TokenSampling(SamplingFields):
    """`sampling_params` of the token endpoint."""

    logprobs: Annotated[int | None, BeforeValidator(_sampled_only)] = None


class TokenRequest(Body):
    """`POST /inference/v1/generate`: tokens in, tokens out."""

    model: str | None = None
    token_ids: Annotated[list[int], Field(min_length=1), FailFast()]
    sampling_params: TokenSampling
    stream: Literal[False] | None = None
    priority: Int | None = None
