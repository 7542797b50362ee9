"""Which generator gets the next sequence.

The one with the least work ahead of it, counted in predicted tokens and not in sequences: sequences of a skewed length
distribution are not alike. Siblings of a group go where their prompt is already cached, as long as that costs less
than the cached prompt saves (`AFFINITY_TOKENS` more predicted tokens than the least loaded generator). A cache shares
whole blocks: siblings of a prompt that fills none are strangers.

A generator that is suspect gets nothing while another one is well, not even siblings. One that is on trial gets one
sequence at a time, so that it can prove itself.

The caller keeps the books (a `GeneratorLoad` a generator) and asks again for every sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ductile.core.instances.instances import InstanceId
from ductile.core.instances.placement import many

AFFINITY_TOKENS = 256
"""Predicted tokens that a generator may have more than the least loaded one, and still get a sibling of a sequence that
it has: beyond them, waiting costs more than computing the prompt once more."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    reason: str
    """Why a generator may be about to fail."""
    on_trial: bool = False
    """It answers when it is asked how it is, and its sequences have failed."""


@dataclass(frozen=True, slots=True)
class GeneratorLoad:
    instance: InstanceId
    remaining_tokens: float
    """Predicted tokens that the generator still has to sample, all its sequences together."""
    groups: frozenset[str] = frozenset()
    """Groups with a request in flight on the generator: their prompts are cached there."""
    num_sequences: int = 0
    suspicion: Suspicion | None = None
    """None for one that is well."""


@dataclass(frozen=True, slots=True)
class Route:
    instance: InstanceId
    reason: str


def route(group: str, loads: Sequence[GeneratorLoad], prompt_tokens: int, block_tokens: int) -> Route:
    """Return the generator for one more sequence of `group` ("" for none), with so long a prompt. Of equal ones the
    first in `loads` gets it.

    block_tokens: tokens of a block of the generators' caches; 0 where sequences share nothing.
    Raises ValueError when there is no generator.
    """
    if not loads:
        raise ValueError("there is no generator to route to")
    well = [load for load in loads if load.suspicion is None]
    tried = [load for load in loads if load.suspicion is not None and load.suspicion.on_trial]
    others = "".join(f"; {load.instance} is suspect: {load.suspicion.reason}" for load in loads if load.suspicion)
    if free := [load for load in tried if not load.num_sequences]:
        return Route(free[0].instance, f"{free[0].instance} is tried with one sequence{others}")
    able = well or tried or loads
    least = min(able, key=lambda load: load.remaining_tokens)
    is_shared = bool(group) and 0 < block_tokens <= prompt_tokens
    siblings = [load for load in able if is_shared and group in load.groups]
    if siblings:
        near = min(siblings, key=lambda load: load.remaining_tokens)
        extra = near.remaining_tokens - least.remaining_tokens
        if extra <= AFFINITY_TOKENS:
            return Route(
                near.instance,
                f"{near.instance} has the prompt of group {group} cached, for {many(round(extra), 'token')} more"
                f"{others}",
            )
    return Route(least.instance, f"{least.instance} has the fewest tokens left: {least.remaining_tokens:.0f}{others}")


def predicted_tokens(max_tokens: int, generated: int, mean_length: float | None) -> float:
    """Predict the tokens that a sequence still takes, as far as one can know.

    mean_length: mean tokens of the completions finished so far; None before the first one.
    A sequence that outlived the mean is expected to need half of what its limit leaves.
    """
    left = max(0, max_tokens - generated)
    if mean_length is None:
        return float(left)
    if generated < mean_length:
        return min(float(left), mean_length - generated)
    return left / 2
