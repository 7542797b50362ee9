"""The trainer's micro-steps, sent one at a time: a micro-batch or a few of each data-parallel rank, and how it went."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ductile.records import MicroBatch

IN_FLIGHT = 2
"""Micro-steps that the trainer's slots have at once: one that runs and one that waits; while a change is under way only
the first."""
AHEAD_S = 0.25
"""Seconds before the expected end of a micro-step at which the next one is sent: many times what a message takes, and
little beside the micro-steps of a model that is worth a change."""

MicroStep = Sequence[tuple[MicroBatch, ...]]
"""Micro-step, which is sent at a time: the micro-batches of each data-parallel rank, equally many."""


@dataclass(frozen=True, slots=True)
class MicroStepDone:
    """A micro-step, and how long it took."""

    num_ranks: int
    """Data-parallel ranks."""
    per_rank: int
    """Micro-batches of each."""
    tokens_fullest: int
    """Tokens of the rank that has most."""
    tokens_all: int
    busy_s: float
    """Seconds that the slowest slot worked; how long the command waited in the slot is not counted."""

    @classmethod
    def of(cls, step: MicroStep, busy_s: float) -> "MicroStepDone":
        tokens = _tokens_of(step)
        return cls(len(step), len(step[0]), max(tokens), sum(tokens), busy_s)

    def expected_s(self, step: MicroStep) -> float:
        """Return the seconds that another one takes, by the tokens of its fullest rank."""
        return self.busy_s * max(_tokens_of(step)) / max(1, self.tokens_fullest)


@dataclass(slots=True)
class PendingSamples:
    """Rest that one `forward_backward` has yet to do."""

    num_samples: int
    num_tokens: int

    def did(self, step: MicroStep) -> None:
        self.num_samples -= sum(len(micro_batch.samples) for of_rank in step for micro_batch in of_rank)
        self.num_tokens -= sum(micro_batch.num_tokens for of_rank in step for micro_batch in of_rank)


def in_steps(packed: Sequence[Sequence[MicroBatch]], sizes: Iterable[int]) -> Iterator[MicroStep]:
    """Return the micro-batches of every rank, so many of each at a time."""
    micro_batches = [iter(of_rank) for of_rank in packed]
    for size in sizes:
        yield [tuple(islice(of_rank, size)) for of_rank in micro_batches]


def _tokens_of(step: MicroStep) -> list[int]:
    """Return the number of tokens of each data-parallel rank."""
    return [sum(micro_batch.num_tokens for micro_batch in of_rank) for of_rank in step]
