"""Turns scored groups into the samples that are trained on: advantages, weights, log-probs under trainer numerics."""

from collections.abc import Sequence
from dataclasses import replace

from ductile.core.batch.advantage import Advantage, has_advantage, mean_baseline, to_samples
from ductile.core.batch.loss_aggregation import LossAggregation, loss_denominator, weigh
from ductile.error_text import error_with_place
from ductile.records import RolloutGroup, Sample
from ductile.roles import CustomCodeFailed, Scorer


class SampleBuilder:
    def __init__(
        self,
        scorer: Scorer | None = None,
        *,
        advantage: Advantage = mean_baseline,
        loss_aggregation: LossAggregation = "token_mean",
        temperature: float = 1.0,
        drop_zero_advantage: bool = True,
        needs_reference: bool = False,
    ) -> None:
        """temperature: of the sampling. needs_reference: ask the scorer for the reference model's log-probs too; what
        is compared with them has a gradient also where all rewards are equal, so nothing is dropped then."""
        self.scorer, self._advantage = scorer, advantage
        self._loss_aggregation: LossAggregation = loss_aggregation
        self._temperature, self._drops = temperature, drop_zero_advantage and not needs_reference
        self._needs_reference = needs_reference

    async def build(self, groups: Sequence[RolloutGroup]) -> list[Sample]:
        """Weighted samples, scored where there is a scorer. Groups without any advantage are left out.

        Raises CustomCodeFailed when the advantage function does.
        """
        by_group = [self._to_samples(group) for group in groups]
        samples = [sample for group in by_group if has_advantage(group) or not self._drops for sample in group]
        samples = weigh(samples, self._loss_aggregation)
        if not self.scorer or not samples:
            return samples
        old = await self.scorer.score(samples, "policy")
        samples = [replace(sample, old_logprobs=values) for sample, values in zip(samples, old, strict=True)]
        if self._needs_reference:
            ref = await self.scorer.score(samples, "reference")
            samples = [replace(sample, ref_logprobs=values) for sample, values in zip(samples, ref, strict=True)]
        return samples

    def _to_samples(self, group: RolloutGroup) -> list[Sample]:
        try:
            return to_samples(group, self._advantage, self._temperature)
        except Exception as error:  # a custom function may raise anything
            raise CustomCodeFailed(
                f"orchestrator.advantage failed on prompt {group.prompt.id}: {error_with_place(error)}"
            ) from error

    def loss_denominator(self, samples: Sequence[Sample]) -> float:
        """Share of these samples in what the summed loss of an optimizer step is divided by."""
        return loss_denominator(samples, self._loss_aggregation)
