"""How much better than its siblings was each completion, and the samples that say so token by token.

A rollout without a reward has no advantage either: it is left out, and its siblings are compared without it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import sqrt

import numpy as np

from ductile.columns import Floats, Mask
from ductile.records import Prompt, Rollout, RolloutGroup, Sample
from ductile.user_numbers import as_number

LARGEST = float(np.finfo(np.float32).max)
"""Largest advantage: the trainer computes in fp32, where a larger number is infinite."""

Advantage = Callable[[list[float], RolloutGroup], list[float]]
"""`function(rewards, group)` gives one advantage a rollout. A custom one has this signature too.

The group holds the scored rollouts only.
"""


def mean_baseline(rewards: list[float], group: RolloutGroup) -> list[float]:
    """Reward minus the group's mean ("default"). Equal rewards give 0, and not what rounding leaves of it."""
    mean = rewards[0] if rewards and all_equal(rewards) else sum(rewards) / max(1, len(rewards))
    return [reward - mean for reward in rewards]


def standardised(rewards: list[float], group: RolloutGroup, eps: float = 1e-6) -> list[float]:
    """Reward minus the group's mean, over its standard deviation ("grpo"). Equal rewards give 0, not 0/0.

    The deviation is the unbiased one, over n - 1, as `torch.std` and so verl and TRL have it.
    """
    centred = mean_baseline(rewards, group)
    std = sqrt(sum(value * value for value in centred) / max(1, len(centred) - 1))
    return [value / (std + eps) for value in centred]


ADVANTAGES: dict[str, Advantage] = {"default": mean_baseline, "grpo": standardised}
"""Advantage functions by the `type` of `[orchestrator.advantage]`, all but `custom`, which the run imports from the
path in the configuration."""


def to_samples(group: RolloutGroup, advantage: Advantage = mean_baseline, temperature: float = 1.0) -> list[Sample]:
    """One sample a scored rollout, in order. `temperature` is the one that the completions were sampled with.

    Raises ValueError when `advantage` does not return one finite number a rollout.
    """
    scored = [(rollout, rollout.reward) for rollout in group.rollouts if rollout.reward is not None]
    if not scored:
        return []
    group = replace(group, rollouts=tuple(rollout for rollout, _ in scored))
    advantages = _checked(advantage([reward for _, reward in scored], group), group)
    return [
        _to_sample(group.prompt, rollout, value, temperature)
        for rollout, value in zip(group.rollouts, advantages, strict=True)
    ]


def all_equal(rewards: Sequence[float]) -> bool:
    """Return whether no rollout did better than a sibling."""
    return len(set(rewards)) <= 1


def has_advantage(samples: Iterable[Sample]) -> bool:
    """Whether any trained token of a group has an advantage. A custom one may give it where all rewards are equal."""
    return any(sample.advantages.array.any() for sample in samples)


def _to_sample(prompt: Prompt, rollout: Rollout, advantage: float, temperature: float) -> Sample:
    num_before = len(prompt.token_ids)
    mask = Mask.full(num_before, False) + rollout.mask
    if not num_before and mask:
        mask = Mask.full(1, False) + mask[1:]  # nothing precedes the first token, so nothing predicted it
    return Sample(
        token_ids=prompt.token_ids + rollout.token_ids,
        loss_mask=mask,
        rollout_logprobs=Floats.full(num_before, 0.0) + rollout.logprobs,
        advantages=Floats.of(np.where(mask.array, np.float32(advantage), np.float32(0.0))),
        # Greedy completions are trained on as they are without a temperature: a division by 0 has no log-prob.
        temperature=temperature or 1.0,
    )


def _checked(advantages: Sequence[object], group: RolloutGroup) -> list[float]:
    """The advantages as plain numbers. Raises ValueError."""
    if len(advantages) != len(group.rollouts):
        raise ValueError(
            f"the advantage function returned {len(advantages)} values for the {len(group.rollouts)} rollouts of "
            f"prompt {group.prompt.id}; it must return one a rollout"
        )
    numbers = [as_number(value) for value in advantages]
    for rollout, (value, number) in enumerate(zip(advantages, numbers, strict=True)):
        if number is None or not abs(number) <= LARGEST:
            raise ValueError(
                f"the advantage of rollout {rollout} of prompt {group.prompt.id} is {value}; it must be a finite "
                "number in fp32"
            )
    return [number for number in numbers if number is not None]
