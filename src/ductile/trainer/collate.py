"""Here records become tensors: one micro-batch, ready to run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ductile.columns import Floats, Mask, TokenIds
from ductile.model.packed import PackedSamples
from ductile.records import MicroBatch, Sample
from ductile.trainer.loss import LossInputs

NOTHING = Sample(token_ids=TokenIds((0, 0)), loss_mask=Mask((False, True)))
"""Sample that runs in place of an empty micro-batch, so that the rank takes its part in every gather and reduction."""


@dataclass(frozen=True, slots=True)
class Batch:
    """N trained tokens; in a batch that only fills a rank's turn they are made up, and `num_trained` is 0."""

    packed: PackedSamples
    weights: Tensor
    """Each token's share in the summed loss [N]."""
    num_trained: int
    loss_inputs: Callable[[Tensor, Tensor], LossInputs]
    """Function of the tokens' log-probs and entropies [N] under the weights in training."""


def collate(micro_batch: MicroBatch, required: Sequence[str] = (), device: str | torch.device = "cpu") -> Batch:
    """A micro-batch as tensors. Raises ValueError when a sample lacks one of the `required` lists, or has a value that
    fp32 cannot hold."""
    # Samples without a trained token have nothing to say in the loss, and other tokens cannot see them.
    samples = [sample for sample in micro_batch.samples if sample.num_trained]
    num_trained = sum(sample.num_trained for sample in samples)
    for index, sample in enumerate(samples):
        _check(sample, index, required)
    samples = samples or [NOTHING]

    def of_tokens(columns: Sequence[Floats], otherwise: float = 0.0) -> Tensor:
        """One value a token, a column a sample (an empty one has `otherwise` for each), to a tensor over trained
        tokens."""
        trained = [
            column.array[sample.loss_mask.array] if column else np.full(sample.num_trained, otherwise, np.float32)
            for sample, column in zip(samples, columns, strict=True)
        ]
        return torch.from_numpy(np.concatenate(trained)).to(device)

    return Batch(
        packed=PackedSamples.of(samples, device),
        weights=of_tokens([sample.weights for sample in samples], otherwise=1.0),
        num_trained=num_trained,
        loss_inputs=partial(
            LossInputs,
            rollout_logprobs=of_tokens([sample.rollout_logprobs for sample in samples]),
            old_logprobs=of_tokens([sample.old_logprobs or sample.rollout_logprobs for sample in samples]),
            reference=of_tokens([sample.ref_logprobs for sample in samples]) if "ref_logprobs" in required else None,
            advantages=of_tokens([sample.advantages for sample in samples]),
            sequences=torch.from_numpy(
                np.repeat(np.arange(len(samples)), [sample.num_trained for sample in samples])
            ).to(device),
        ),
    )


def _check(sample: Sample, index: int, required: Sequence[str]) -> None:
    lists = {
        "rollout_logprobs": sample.rollout_logprobs,
        "advantages": sample.advantages,
        "weights": sample.weights,
        "old_logprobs": sample.old_logprobs,
        "ref_logprobs": sample.ref_logprobs,
    }
    if sample.loss_mask[0]:
        raise ValueError(f"sample {index} trains on its first token, which nothing precedes")
    if not sample.temperature > 0:
        raise ValueError(f"sample {index} has temperature {sample.temperature}; it must be above 0")
    for name, values in lists.items():
        if not values and name in required:
            raise ValueError(f"sample {index} has no {name}, which the configured loss needs")
        if not np.isfinite(values.array).all():
            raise ValueError(f"sample {index} has {name} that are not finite numbers in fp32")
