"""How tokens are drawn: the values that a request says, in words that the command line reads without numpy."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Field names and meanings are those of the OpenAI API and its vLLM extensions."""

    temperature: float = 1.0
    """What logits are divided by; 0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """Tokens of the highest probability that may be drawn; -1 keeps all."""
    min_p: float = 0.0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after one of these tokens, which is part of the output, so that it can be trained on."""
    stop: tuple[str, ...] = ()
    """Generation ends when the decoded text contains one of these strings, with special tokens spelled out or without
    them."""
    seed: int | None = None
    """Requests with one seed get the same tokens for the same prompt, whatever else runs in the batch and across a
    migration. None: the engine derives a seed from its own and the request's id."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """Whether the text that is shown leaves out special tokens."""
    include_stop_str_in_output: bool = False
    """True where the text that a reward is given has the stop string that ended it; the tokens have it anyhow."""
