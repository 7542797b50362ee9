"""The batches that parity is shown with: samples of all lengths, prompts that several share, temperatures, holes in
what is trained on, and micro-batches without a sample."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from ductile.core.batch.loss_aggregation import loss_denominator
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.records import MicroBatch, Sample
from tests.trainer.naive import make_samples

SEQ_LEN = 64
"""Most tokens of a micro-batch."""
LENGTHS = (
    ((31, 7, 18, 44, 12, 25, 9, 16, 21, 13), (28, 5), ()),
    ((22, 40, 9, 17), (30, 6)),
    ((35, 6, 28),),
)
"""Of the samples of each chunk of each batch, in tokens. Where a chunk has fewer samples than there are data-parallel
ranks, some have an empty micro-batch."""
SIBLINGS = ((0, 2, 5), (3, 8))
"""Samples of a chunk that are completions of one prompt."""
PROMPT_LEN = 6


@dataclass(frozen=True)
class TrainingBatch:
    """What one optimizer step is taken on, in chunks, as a loop gives them to its trainer."""

    chunks: tuple[tuple[Sample, ...], ...]

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(sample for chunk in self.chunks for sample in chunk)

    @property
    def loss_denominator(self) -> float:
        return loss_denominator(self.samples)


def micro_batches(samples: Sequence[Sample], layout: ParallelLayout) -> list[tuple[MicroBatch, ...]]:
    """Those of each data-parallel rank, as the trainer's client packs them; without samples each has an empty one."""
    packed = pack(samples, layout.num_data_parallel, SEQ_LEN)
    return [tuple(of_rank) or (MicroBatch(()),) for of_rank in packed]


def _make_batches() -> Iterator[TrainingBatch]:
    seeds = count()
    for batch in (*LENGTHS, *LENGTHS[:2]):
        yield TrainingBatch(tuple(_make_chunk(lengths, next(seeds)) for lengths in batch))


def _make_chunk(lengths: Sequence[int], seed: int) -> tuple[Sample, ...]:
    samples = make_samples(lengths, seed, temperatures=(1.0, 0.7, 1.3))
    for family in SIBLINGS:
        for index in family:
            if index < len(samples):
                samples[index] = _after_prompt(samples[index], samples[family[0]].token_ids[:PROMPT_LEN])
    return tuple(samples)


def _after_prompt(sample: Sample, prompt: Sequence[int]) -> Sample:
    """The sample with this prompt, of which no token is trained on, and the token after it is: the prompt ends here."""
    length = len(prompt)
    mask = [False] * length + [True] + list(sample.loss_mask[length + 1 :])
    return replace(sample, token_ids=(*prompt, *sample.token_ids[length:]), loss_mask=mask)


FIVE_BATCHES = tuple(_make_batches())
BATCHES = FIVE_BATCHES[: len(LENGTHS)]
"""Batches of few optimizer steps, as most checks take them."""
