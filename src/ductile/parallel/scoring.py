"""Scoring a packed micro-batch on a parallel model."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ductile.model.attention import Attend, PackedAttention
from ductile.model.logprobs import LogprobHead
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel.parallel_context import ParallelContext


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What a slot's part of the model is called with for a micro-batch."""

    token_ids: Tensor
    positions: Tensor
    attend: Attend
    head: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Head of the model that gives log-probs [N] and entropies [N] of the scored tokens."""
    num_hidden: int
    """Tokens of which this slot has the hidden states between two layers."""


def model_inputs(packed: PackedSamples, context: ParallelContext, chunk_tokens: int | None) -> ModelInputs:
    """chunk_tokens: see `ductile.model.logprobs.LogprobHead`."""
    head = LogprobHead(packed.rows, packed.targets, packed.temperatures, chunk_tokens)
    attend = PackedAttention(packed.stems, packed.branches)
    return ModelInputs(packed.token_ids, packed.positions, attend, head, len(packed.token_ids))


def score(
    model: Transformer, packed: PackedSamples, context: ParallelContext, chunk_tokens: int | None
) -> tuple[Tensor, Tensor]:
    """Log-probs [N] (with gradient, if enabled) and entropies [N] of the scored tokens, on every slot of tp and cp."""
    inputs = model_inputs(packed, context, chunk_tokens)
    return model(inputs.token_ids, inputs.positions, inputs.attend, inputs.head)
