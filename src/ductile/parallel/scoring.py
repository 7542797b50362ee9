"""Scoring a packed micro-batch on a parallel model."""

from torch import Tensor

from ductile.model.attention import PackedAttention
from ductile.model.logprobs import LogprobHead
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.vocabulary_parallel import VocabularyParallelHead


def score(
    model: Transformer, packed: PackedSamples, context: ParallelContext, chunk_tokens: int | None
) -> tuple[Tensor, Tensor]:
    """Log-probs [N] (with gradient, if enabled) and entropies [N] of the scored tokens, on every slot of tp and cp.

    chunk_tokens: see `ductile.model.logprobs.LogprobHead`.
    """
    tp = context.layout.dims.tp
    packed = packed.padded(-(-len(packed.token_ids) // tp) * tp)
    head = LogprobHead(packed.rows, packed.targets, packed.temperatures, chunk_tokens)
    if tp > 1:
        head = VocabularyParallelHead(head, model.spec.vocab_size, context.group("tp"))
    return model(packed.token_ids, packed.positions, PackedAttention(packed.stems, packed.branches), head)
