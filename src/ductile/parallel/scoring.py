"""Scoring a packed micro-batch on a parallel model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ductile.columns import Floats
from ductile.config.schema.model import TrainerModelConfig
from ductile.core.layout.geometry.context_parallel import CpStyle
from ductile.core.layout.model.spec import ModelSpec
from ductile.model.attention import Attend
from ductile.model.logprobs import LogprobHead
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel.context_parallel import aligned, split
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.vocabulary_parallel import VocabularyParallelHead
from ductile.records import Sample


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """How the head computes what it says: see `ductile.model.logprobs.LogprobHead`."""

    chunk_tokens: int | None = None
    fp32: bool = False

    @classmethod
    def of(cls, config: TrainerModelConfig) -> "HeadOptions":
        return cls(config.head_chunk_tokens, config.fp32_lm_head)


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What a slot's part of the model is called with for a micro-batch."""

    token_ids: Tensor
    positions: Tensor
    attend: Attend
    head: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Head of the model that gives log-probs [N] and entropies [N] of the scored tokens, on every slot of tp and cp."""
    num_hidden: int
    """Tokens of which this slot has the hidden states between two layers."""


def model_inputs(
    spec: ModelSpec, packed: PackedSamples, context: ParallelContext, head_options: HeadOptions, cp_style: CpStyle
) -> ModelInputs:
    """Return the part of `packed` that a slot runs."""
    dims = context.layout.dims
    part = split(aligned(packed, cp_style, dims.cp, dims.tp), cp_style, context.group("cp"))
    chunk_tokens, fp32 = head_options.chunk_tokens, head_options.fp32
    own_head = LogprobHead(part.rows, part.targets, part.temperatures, chunk_tokens, fp32)
    if dims.tp > 1:
        own_head = VocabularyParallelHead(own_head, spec.vocab_size, context.group("tp"))

    def head(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return part.gather(*own_head(hidden, weight))

    return ModelInputs(part.token_ids, part.positions, part.attend, head, len(part.token_ids) // dims.tp)


def score(
    model: Transformer, packed: PackedSamples, context: ParallelContext, head_options: HeadOptions, cp_style: CpStyle
) -> tuple[Tensor, Tensor]:
    """Log-probs [N] (with gradient, if enabled) and entropies [N] of the scored tokens, on every slot of tp and cp."""
    inputs = model_inputs(model.spec, packed, context, head_options, cp_style)
    return model(inputs.token_ids, inputs.positions, inputs.attend, inputs.head)


def as_columns(samples: Sequence[Sample], logprobs: Tensor) -> list[Floats]:
    """One column a sample, as long as its tokens, of the log-probs [N] of all their scored tokens; 0 for the others."""
    columns: list[Floats] = []
    for sample, scored in zip(samples, logprobs.cpu().split([each.num_trained for each in samples]), strict=True):
        values = np.zeros(len(sample), np.float32)
        values[sample.loss_mask.array] = scored.float().numpy()
        columns.append(Floats.of(values))
    return columns
