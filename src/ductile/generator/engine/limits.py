"""What an engine can serve: a pure function from a request to why not, asked before the request takes any place."""

from collections.abc import Sequence
from dataclasses import dataclass

from ductile.core.rollouts.sampling_limits import wrong_sampling
from ductile.records import GenerateRequest


class RequestRefused(ValueError):
    """A request that this engine can never serve. `reason` says why, and what would be possible."""

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(f"request {id}: {reason}")
        self.reason = reason


class Overloaded(Exception):
    """There is no room for the request now."""


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    vocab_size: int
    max_model_len: int
    cache_tokens: int
    """Tokens that the whole KV cache holds."""

    def max_len(self, prompt_len: int, max_tokens: int) -> int:
        """Prompt plus completion, in tokens, at which generation ends."""
        return min(prompt_len + max_tokens, self.max_model_len)

    def room(self, prompt_len: int) -> int:
        """Tokens that the model and the whole KV cache leave for a completion."""
        return min(self.max_model_len, self.cache_tokens) - prompt_len

    def too_long(self, num_prompt: str) -> str:
        """Why a prompt is refused for its length. `num_prompt`: the prompt's tokens, or what is known of them."""
        return (
            f"the prompt has {num_prompt} tokens; model.max_model_len {self.max_model_len} leaves room for "
            f"{self.max_model_len - 1} and one of the completion"
        )

    def unknown_token(self, tokens: Sequence[int]) -> str:
        """Why these are no tokens of the model's; empty when they are."""
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < self.vocab_size:
                return f"token id {str(token)[:40]} is not in the vocabulary; ids go from 0 to {self.vocab_size - 1}"
        return ""

    def why_not(self, request: GenerateRequest) -> str:
        """Why the request can never be served; empty when it can."""
        num_prompt = len(request.prompt)
        if not num_prompt:
            return "the prompt has no tokens; it needs at least one"
        if num_prompt >= self.max_model_len:  # first, as it costs nothing however long the prompt is
            return self.too_long(f"{num_prompt}")
        if unknown := self.unknown_token(request.prompt) or self.unknown_token(request.generated):
            return unknown
        max_len = self.max_len(num_prompt, request.sampling.max_tokens)
        if max_len > self.cache_tokens:
            return (
                f"prompt and completion may reach {max_len} tokens and the whole cache holds {self.cache_tokens}; "
                "raise num_blocks or cache_memory_gib, or lower max_tokens"
            )
        return wrong_sampling(request.sampling)
