"""Scoring a packed micro-batch on a parallel model."""

from torch import Tensor

from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel.parallel_context import ParallelContext


def score(
    model: Transformer, packed: PackedSamples, context: ParallelContext, chunk_tokens: int | None
) -> tuple[Tensor, Tensor]:
    """Log-probs [N] (with gradient, if enabled) and entropies [N] of the scored tokens, on every slot of tp and cp.

    chunk_tokens: see `ductile.model.logprobs.LogprobHead`.
    """
    return packed.score(model, chunk_tokens)
