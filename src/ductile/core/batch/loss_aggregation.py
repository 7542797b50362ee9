"""How much each token counts.

A rank adds `weight * loss` over its tokens to the gradient and divides by nothing. Once, before the optimizer step,
the sum over all ranks and micro-batches is divided by the batch's `loss_denominator`. So the gradient does not depend
on how many ranks took part, nor on how the samples were packed.

    mode                  weight of a token    denominator      what counts alike
    token_mean            1                    trained tokens   every token
    seq_mean_token_mean   1/sequence's tokens  sequences        every sequence
    seq_mean_token_sum    1                    sequences        every token, whatever the batch's lengths add up to

Only trained tokens (`loss_mask` 1) count; a sequence without any is no sequence.
"""

from collections.abc import Sequence
from dataclasses import replace

from ductile.columns import Floats
from ductile.core.batch.aggregation import LossAggregation
from ductile.records import NO_FLOATS, Sample


def weigh(samples: Sequence[Sample], mode: LossAggregation = "token_mean") -> list[Sample]:
    """The samples with `weights` set. A sample's weights do not depend on the other samples."""
    if mode != "seq_mean_token_mean":
        return [replace(sample, weights=NO_FLOATS) for sample in samples]  # empty means 1
    return [replace(sample, weights=Floats.full(len(sample), 1 / max(1, sample.num_trained))) for sample in samples]


def loss_denominator(samples: Sequence[Sample], mode: LossAggregation = "token_mean") -> float:
    """What the summed loss of all samples of one optimizer step is divided by; 0 when nothing is trained."""
    if mode == "token_mean":
        return float(sum(sample.num_trained for sample in samples))
    return float(sum(sample.num_trained > 0 for sample in samples))
