"""Scoring a packed micro-batch on a parallel model."""

from torch import Tensor

from ductile.core.layout.context_parallel import CpStyle
from ductile.model.logprobs import LogprobHead
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel.context_parallel import aligned, split
from ductile.parallel.parallel_context import ParallelContext


def score(
    model: Transformer, packed: PackedSamples, context: ParallelContext, chunk_tokens: int | None, cp_style: CpStyle
) -> tuple[Tensor, Tensor]:
    """Log-probs [N] (with gradient, if enabled) and entropies [N] of the scored tokens, on every slot of tp and cp.

    chunk_tokens: see `ductile.model.logprobs.LogprobHead`.
    """
    dims = context.layout.dims
    part = split(aligned(packed, cp_style, dims.cp, dims.tp), cp_style, context.group("cp"))
    head = LogprobHead(part.rows, part.targets, part.temperatures, chunk_tokens)
    return part.gather(*model(part.token_ids, part.positions, part.attend, head))
