"""The ways to count tokens in a loss, by name; `ductile.core.batch.loss_aggregation` says what each does."""

from typing import Literal

LossAggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]
