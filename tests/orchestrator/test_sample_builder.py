"""Which groups become samples, with whose log-probs."""

import asyncio
from collections.abc import Sequence

import pytest

from ductile.core.rollouts.provenance import KnownWeights
from ductile.orchestrator.loop.sample_builder import SampleBuilder
from ductile.records import Manifest, Prompt, Rollout, RolloutGroup, Sample


class Scores:
    """A scorer that says -1 of the policy and -2 of the reference."""

    async def score(self, samples: Sequence[Sample], model: str) -> list[tuple[float, ...]]:
        value = -1.0 if model == "policy" else -2.0
        return [(value,) * len(sample) for sample in samples]

    async def receive(self, manifest: Manifest) -> KnownWeights:
        raise AssertionError


def group(*rewards: float) -> RolloutGroup:
    rollouts = tuple(Rollout((7, 2), (True, True), (-0.7, -0.1), (3, 3), "stop", reward) for reward in rewards)
    return RolloutGroup(Prompt("train/0/1", "task", 1, (5, 6)), rollouts)


@pytest.mark.parametrize(
    ("drop_zero_advantage", "needs_reference", "num_samples"),
    [
        (True, False, 2),
        (False, False, 4),
        (True, True, 4),  # the KL term has something to say of equal completions too
    ],
)
def test_which_groups_become_samples(drop_zero_advantage: bool, needs_reference: bool, num_samples: int) -> None:
    sample_builder = SampleBuilder(Scores(), drop_zero_advantage=drop_zero_advantage, needs_reference=needs_reference)
    samples = asyncio.run(sample_builder.build([group(1.0, 0.0), group(1.0, 1.0)]))
    assert len(samples) == num_samples
    assert sample_builder.loss_denominator(samples) == 2 * num_samples  # what is dropped is not divided by either
    assert {sample.ref_logprobs for sample in samples} == ({(-2.0,) * 4} if needs_reference else {()})
