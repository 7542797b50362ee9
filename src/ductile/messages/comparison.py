"""Request of `ductile compare` to the process that has both models, and its findings."""

from math import inf
from typing import Any

import msgspec


class Compare(msgspec.Struct, frozen=True):
    """Compare generator and scorer on these prompts."""

    config: dict[str, Any]
    """An `RLConfig`, dumped."""
    prompts: tuple[tuple[int, ...], ...]
    num_decoded: int
    """Tokens that the generator adds to each prompt, greedily."""
    num_worst: int


class ComparedToken(msgspec.Struct, frozen=True):
    """A token of the vocabulary in one place of a prompt, as both sides see it."""

    prompt: int
    """Number of the prompt, from 1."""
    position: int
    """Place in the prompt and what follows it, from 1: how many tokens are before the token."""
    token: int
    generator: float
    scorer: float
    """Log-probs, natural, at temperature 1."""
    is_decoded: bool = False
    """The generator has sampled it in a decode step, from its cache."""

    @property
    def difference(self) -> float:
        """Distance of the two, in nats; infinite where a side has no number."""
        apart = abs(self.generator - self.scorer)
        return apart if apart == apart else inf


class Comparison(msgspec.Struct, frozen=True, tag=True):
    dtype: str
    """The coarser one that the two sides compute in: "float32" or "bfloat16"."""
    num_positions: int
    vocab_size: int
    num_decoded: int
    largest: float
    mean: float
    share_over: float
    """Share of all log-probs that differ by more than 1e-3, 0 to 1."""
    worst: tuple[ComparedToken, ...]
    """Tokens that differ most, the worst first; each place's worst one at most."""


class NotCompared(msgspec.Struct, frozen=True, tag=True):
    why: str
    """A sentence without its full stop."""
