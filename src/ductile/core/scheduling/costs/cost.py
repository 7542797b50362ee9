"""How many seconds things take: the measured speeds that policies, plans and the simulator reckon with.

All numbers are of one slot and come from the run itself (or from a file that says where it has them from). None of them
is exact; a policy that reckons with them asks for more than the difference of two predictions that are nearly equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, prod
from statistics import fmean
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ductile.core.layout.geometry.parallel_layout import ONE_SLOT_RANK, RankShape
from ductile.core.layout.geometry.pipeline_schedule import PipelineShape
from ductile.core.scheduling.costs.arithmetic import least_squares

Amount = TypeVar("Amount", float, npt.NDArray[np.float64])
"""One number, or an array with one for each of the plans that are compared."""


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Seconds of one decode step of one generator, in which each of its sequences gets one token.

    A step reads the weights (`step_s`, whatever the batch), works for each sequence (`per_sequence_s`) and reads the
    cache (`per_context_s` for each token that some sequence has in it).
    """

    step_s: float
    per_sequence_s: float = 0.0
    per_context_s: float = 0.0

    def seconds(self, num_sequences: Amount, context_tokens: Amount | float = 0.0) -> Amount:
        return self.step_s + self.per_sequence_s * num_sequences + self.per_context_s * context_tokens

    @staticmethod
    def fit(points: Sequence[tuple[float, float, float]]) -> "DecodeSpeed":
        """The speed that fits measurements (sequences, context tokens, seconds a step) best, by least squares with no
        negative part.

        Raises ValueError without points. What the points cannot tell apart (all at one batch size) goes to `step_s`.
        """
        if not points:
            raise ValueError("a decode speed needs at least one measured step")
        sequences, context, seconds = (np.array(column, float) for column in zip(*points, strict=True))
        columns = [np.ones_like(seconds), sequences, context]
        used = [column for column in range(3) if column == 0 or np.ptp(columns[column]) > 0]
        while True:
            found = least_squares([columns[column] for column in used], seconds)
            negative = [column for column, value in zip(used, found, strict=True) if value < 0]
            if not negative or len(used) == 1:
                break
            used.remove(max(negative))  # the cache before the batch, the batch before the step
        parts = dict(zip(used, (max(0.0, value) for value in found), strict=True))
        return DecodeSpeed(parts.get(0, 0.0), parts.get(1, 0.0), parts.get(2, 0.0))


ASSUMED_OVERHEADS = {"cp": 0.05, "tp": 0.05}
"""Share of a rank's speed that each further slot along an axis costs, before it is measured. cp: prime-rl measured
8 % less at cp 2 and no less at cp 4 (ulysses, 8 H200). tp: 5 % less at tp 2 and a quarter less at tp 8 is what one
machine's links usually leave."""


@cache
def assumed_rank_speed(shape: RankShape) -> float:
    """How many times as fast as one slot the slots of a data-parallel rank are, before it is measured. Of pp they lose
    the bubble of a full message, with one run of layers a slot."""
    pipeline, sizes = PipelineShape(shape.pp), shape._asdict()
    lost = prod(1 + overhead * (sizes[axis] - 1) for axis, overhead in ASSUMED_OVERHEADS.items())
    return prod(shape) * (1 - pipeline.bubble(pipeline.full_message)) / lost


@dataclass(frozen=True, slots=True)
class TrainSpeed:
    """Speed of forward, backward and the gradients' reduction. `n` data-parallel ranks are
    `n / (1 + overhead * (n - 1))` times as fast as one."""

    tokens_per_s: float
    """Tokens that one rank alone, on one slot, trains on per second."""
    overhead: float = 0.0
    """Share of a token's time that each further rank adds for all ranks; measured by training on two different numbers
    of ranks."""
    micro_step_s: float = 0.0
    """Seconds that every micro-step takes, however small: messages, launches, the collective's start."""
    rank_speeds: tuple[tuple[RankShape, float], ...] = ()
    """How many times as fast as one slot the slots of a data-parallel rank are, by their shape, where it was measured;
    elsewhere it is assumed (`assumed_rank_speed`)."""

    def rank_speed(self, shape: RankShape) -> float:
        return dict(self.rank_speeds).get(shape) or assumed_rank_speed(shape)

    def of(self, num_ranks: Amount, rank_speed: Amount | float = 1.0) -> Amount:
        """Tokens that so many ranks together train on per second, when micro-steps are full."""
        # `abs` keeps the speed of no ranks at 0, whatever the overhead.
        return self.tokens_per_s * num_ranks / (1 + self.overhead * abs(num_ranks - 1)) * rank_speed

    def seconds(self, tokens_fullest: float, num_ranks: int, shape: RankShape = ONE_SLOT_RANK) -> float:
        """Seconds of one micro-step in which the fullest rank has so many tokens, in a full message: others take
        longer (`PipelineShape.stretch`)."""
        tokens_per_s = self.tokens_per_s * self.rank_speed(shape)
        return self.micro_step_s + tokens_fullest * (1 + self.overhead * (num_ranks - 1)) / tokens_per_s


@dataclass(frozen=True, slots=True)
class Speeds:
    decode: DecodeSpeed
    prefill_tokens_per_s: float
    train: TrainSpeed
    score_tokens_per_s: float = float("inf")
    optim_s: float = 0.0
    """Seconds of an optimizer step, on however many slots."""
    publish_s: float = 0.0
    """Seconds in which a weight version leaves the trainer."""
    receive_s: float = 0.0
    """Seconds in which a generator or scorer makes a weight version live; generators pause for it."""


def mean_speeds(several: Sequence[Speeds]) -> Speeds:
    """Speeds with which everything takes the mean of the seconds that it takes with each of `several`."""
    decodes, trains = [each.decode for each in several], [each.train for each in several]
    token_s = fmean(1 / train.tokens_per_s for train in trains)
    scores = [each.score_tokens_per_s for each in several if each.score_tokens_per_s < inf]  # inf: none scored yet
    return Speeds(
        DecodeSpeed(
            fmean(decode.step_s for decode in decodes),
            fmean(decode.per_sequence_s for decode in decodes),
            fmean(decode.per_context_s for decode in decodes),
        ),
        1 / fmean(1 / each.prefill_tokens_per_s for each in several),
        TrainSpeed(
            1 / token_s,
            fmean(train.overhead / train.tokens_per_s for train in trains) / token_s,
            fmean(train.micro_step_s for train in trains),
            _mean_rank_speeds(trains),
        ),
        1 / fmean(1 / speed for speed in scores) if scores else inf,
        fmean(each.optim_s for each in several),
        fmean(each.publish_s for each in several),
        fmean(each.receive_s for each in several),
    )


def _mean_rank_speeds(trains: Sequence[TrainSpeed]) -> tuple[tuple[RankShape, float], ...]:
    measured: dict[RankShape, list[float]] = {}
    for train in trains:
        for shape, speed in train.rank_speeds:
            measured.setdefault(shape, []).append(1 / speed)
    return tuple((shape, 1 / fmean(times)) for shape, times in sorted(measured.items()))


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """What a change of roles costs, as measured in this run."""

    resize_s: float = 0.0
    """Seconds that a resize takes from the work of the trainer's slots: the pause, what the first micro-step afterwards
    takes longer, and on CPUs the preparation."""
    prepare_s: float = 0.0
    """Seconds from the decision until the trainer's slots can resize when no micro-step runs; all slots go on with what
    they do meanwhile. Where micro-steps run, messages wait for them besides."""
    assign_s: float = 0.0
    """Seconds until a slot that becomes a generator or scorer is one: weights from a peer, cache allocated. No other
    slot waits for it."""
    release_s: float = 0.0
    """Seconds until a slot that stops generating or scoring has freed its cache and weights."""
    park_s: float = 0.0
    """Seconds in which the trainer's state leaves the devices of its slots for host memory, so that they can be lent;
    all slots at once."""
    unpark_s: float = 0.0
    """Seconds until it is back."""
    migration_s: float = 0.0
    """Seconds in which rollouts change generators, however many at once: messages and bookkeeping. Rollouts that
    migrate wait for it, others do not. Neither prefill nor caches are in it."""
    cache_bytes_per_token: float = 0.0
    cache_bytes_per_s: float = 0.0
    """Bytes of KV cache that travel from one slot to another per second; 0 when the cache cannot travel."""
    resize_network_s: float = 0.0
    """Seconds that a resize takes more where its slots are on several nodes: state then goes through messages."""
    assign_network_s: float = 0.0
    """Seconds that a slot takes more to become a generator or scorer where no slot of its node has the weights."""
    cache_network_bytes_per_s: float = 0.0
    """Bytes of KV cache that travel to a slot of another node per second; 0: as many as inside one."""

    def between(self, *, nodes: bool) -> "SwitchCosts":
        """Return what changes cost between slots of different nodes, or inside one."""
        if not nodes:
            return self
        return replace(
            self,
            resize_s=self.resize_s + self.resize_network_s,
            assign_s=self.assign_s + self.assign_network_s,
            cache_bytes_per_s=self.cache_network_bytes_per_s or self.cache_bytes_per_s,
        )


@dataclass(frozen=True, slots=True)
class ContextTransfer:
    """How an unfinished rollout's context gets to another generator."""

    with_cache: bool
    seconds: float


def context_transfer(context_tokens: float, speeds: Speeds, costs: SwitchCosts) -> ContextTransfer:
    """The cheaper of sending the cache along and prefilling again; without a cache carrier, always the latter."""
    prefill_s = context_tokens / speeds.prefill_tokens_per_s
    if costs.cache_bytes_per_s <= 0:
        return ContextTransfer(False, prefill_s)
    send_s = context_tokens * costs.cache_bytes_per_token / costs.cache_bytes_per_s
    return ContextTransfer(True, send_s) if send_s < prefill_s else ContextTransfer(False, prefill_s)
