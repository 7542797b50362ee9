"""The weighted sum over the loss denominator is the mean that the mode's name promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.columns import Floats
from ductile.core.batch.loss_aggregation import LossAggregation, loss_denominator, weigh
from ductile.records import Sample

masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=8), min_size=1, max_size=8)


def mean_by_definition(losses: list[np.ndarray], mode: LossAggregation) -> float:
    losses = [loss for loss in losses if len(loss)]
    if not losses:
        return 0.0
    if mode == "token_mean":
        return float(np.mean(np.concatenate(losses)))
    if mode == "seq_mean_token_mean":
        return float(np.mean([np.mean(loss) for loss in losses]))
    return float(np.mean([np.sum(loss) for loss in losses]))


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
@given(masks=masks)
def test_weighted_sum_over_loss_denominator(mode: LossAggregation, masks: list[list[bool]]) -> None:
    samples = weigh([Sample(tuple(range(len(mask))), tuple(mask)) for mask in masks], mode)
    token_losses = [np.sin(np.arange(len(mask)) + index) for index, mask in enumerate(masks)]
    weights = [(1 / sum(mask) if any(mask) and mode == "seq_mean_token_mean" else 1.0,) * len(mask) for mask in masks]
    assert [sample.weights or Floats.full(len(sample), 1.0) for sample in samples] == list(map(Floats, weights))
    total = sum(
        loss * of_sample[i]
        for sample, losses, of_sample in zip(samples, token_losses, weights, strict=True)
        for i, loss in enumerate(losses)
        if sample.loss_mask[i]
    )
    trained = [losses[np.array(mask)] for mask, losses in zip(masks, token_losses, strict=True)]
    assert total / max(1, loss_denominator(samples, mode)) == pytest.approx(mean_by_definition(trained, mode), abs=1e-9)


def test_parts_of_a_batch_add_up() -> None:
    """Weights do not look at the neighbours, and denominators are sums: any split into micro-batches gives the same."""
    samples = [Sample((1,) * n, (False,) + (True,) * (n - 1)) for n in (2, 5, 9)]
    for mode in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum"):
        assert weigh(samples, mode) == [weighed for sample in samples for weighed in weigh([sample], mode)]
        assert loss_denominator(samples, mode) == sum(loss_denominator([sample], mode) for sample in samples)
