"""Which rank runs which samples together.

Samples have very different lengths, and all ranks meet at every micro-batch, so that each waits for the slowest.

1. A sample costs its tokens plus a quadratic term for attention (`Cost`).
2. First-fit decreasing says how few micro-batches hold everything; rounded up to equally many a rank.
3. Completions of one prompt stay together, as a micro-batch runs what its samples share once. Such families, dearest
   first, go to the cheapest micro-batch that has room; then single samples move from the dearest to the cheapest as
   long as that helps. Where families do not fit, samples go one by one.
4. Few micro-batches leave a pipeline's slots waiting, many run shared prompts again. Where they would not make a full
   message, twice as many are tried, four times and so on, and the number is taken with which the slots are done first.
5. Micro-batches, dearest first, are dealt out in rows of one a rank: those that run at the same time cost alike, and
   the largest come first, so that a job that runs out of memory does so at once.

Any number of ranks works. Where samples do not suffice, a rank gets empty micro-batches: its turn in the collectives.
The result is a function of the samples, the number of ranks and the pipeline alone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ductile.columns import TokenIds
from ductile.core.layout.geometry.pipeline_schedule import NO_PIPELINE, PipelineShape
from ductile.records import MicroBatch, Sample


class SampleTooLong(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class Cost:
    """Relative time of one sample's forward and backward pass: `tokens + per_pair * tokens^2`."""

    per_pair: float = 1 / 12_288
    """Cost of a pair of tokens, where a token costs 1. A layer of width M takes about 24 M^2 operations a token and 2 M
    a pair (causal), which makes 1/(12 M); the default is that of M = 1024."""
    per_micro_batch: float = 256
    """Cost of a micro-batch, however small: its kernels are launched, and its hidden states sent. Assumed."""

    def __call__(self, num_tokens: int) -> float:
        return num_tokens + self.per_pair * num_tokens * num_tokens


@dataclass(slots=True)
class _Bin:
    room: int
    cost: float = 0.0
    samples: list[Sample] = field(default_factory=list[Sample])

    def put(self, sample: Sample, cost: float) -> None:
        self.samples.append(sample)
        self.room -= len(sample)
        self.cost += cost

    def take(self, sample: Sample, cost: float) -> None:
        self.samples.remove(sample)
        self.room += len(sample)
        self.cost -= cost


def pack(
    samples: Sequence[Sample],
    num_ranks: int,
    seq_len: int,
    cost: Cost | None = None,
    pipeline: PipelineShape = NO_PIPELINE,
) -> list[list[MicroBatch]]:
    """Micro-batches of at most `seq_len` tokens for each rank, equally many on every rank (none without samples).

    Raises SampleTooLong when a sample has more than `seq_len` tokens.
    """
    cost = cost or Cost()
    for index, sample in enumerate(samples):
        if len(sample) > seq_len:
            raise SampleTooLong(
                f"sample {index} has {len(sample)} tokens and seq_len is {seq_len}: raise seq_len, or lower the "
                f"sampling's max_tokens"
            )
    dearest_first = sorted(samples, key=len, reverse=True)
    prompts = {id(sample): sample.prompt for sample in samples}
    keys = {which: b"" if prompt is None else prompt.array.tobytes() for which, prompt in prompts.items()}
    families = _families(dearest_first, keys, seq_len), [[sample] for sample in dearest_first]
    fewest = -(-_num_bins_needed(dearest_first, seq_len) // num_ranks)
    numbers = _numbers_of_rows(fewest, min(pipeline.full_message, len(samples) // num_ranks))
    tries = [_in_rows(rows, families, num_ranks, seq_len, cost) for rows in numbers]
    if len(tries) == 1:
        return _deal(tries[0], num_ranks)

    def turns(bins: Sequence[_Bin]) -> float:
        costs = sorted((_cost_of(each.samples, keys, cost) for each in bins), reverse=True)
        return sum(costs[::num_ranks]) + pipeline.bubble_turns * costs[0]

    return _deal(min(tries, key=turns), num_ranks)


def split_by_tokens(samples: Sequence[Sample], num_parts: int) -> list[list[int]]:
    """Indices of `samples` in parts of about equally many tokens: the longest first, each to the shortest part."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    num_tokens = [0] * num_parts
    for index in sorted(range(len(samples)), key=lambda index: -len(samples[index])):
        part = num_tokens.index(min(num_tokens))
        parts[part].append(index)
        num_tokens[part] += len(samples[index])
    return parts


def _num_bins_needed(dearest_first: Sequence[Sample], seq_len: int) -> int:
    """Micro-batches that first-fit decreasing needs: at most 11/9 of the fewest possible."""
    rooms: list[int] = []
    for sample in dearest_first:
        for index, room in enumerate(rooms):
            if len(sample) <= room:
                rooms[index] -= len(sample)
                break
        else:
            rooms.append(seq_len - len(sample))
    return len(rooms)


def _families(dearest_first: Sequence[Sample], keys: Mapping[int, bytes], seq_len: int) -> list[list[Sample]]:
    """Samples with equal tokens before the first trained one, as many of them as a micro-batch holds."""
    families: list[list[Sample]] = []
    open_by_prompt: dict[bytes, list[Sample]] = {}
    for sample in dearest_first:
        key = keys[id(sample)]
        family = open_by_prompt.get(key)
        if family is None or sum(map(len, family)) + len(sample) > seq_len:
            family = list[Sample]()
            families.append(family)
            if key:
                open_by_prompt[key] = family
        family.append(sample)
    return families


def _numbers_of_rows(fewest: int, most: int) -> list[int]:
    numbers = [fewest]
    while 0 < numbers[-1] < most:
        numbers.append(min(2 * numbers[-1], most))
    return numbers


def _in_rows(
    rows: int, families: Sequence[Sequence[list[Sample]]], num_ranks: int, seq_len: int, cost: Cost
) -> list[_Bin]:
    """Balanced bins, so many for each rank, or a few more. families: ways to keep samples together; the first that fits
    is taken."""
    while True:
        for family in families:
            bins = _fill(family, rows * num_ranks, seq_len, cost)
            if bins is not None:
                _even_out(bins, cost)
                return bins
        rows += 1  # the loop ends at the latest when each micro-batch holds one sample


def _cost_of(samples: Sequence[Sample], keys: Mapping[int, bytes], cost: Cost) -> float:
    """What a micro-batch of these samples costs, which runs what they share once."""
    repeated = Counter(keys[id(sample)] for sample in samples)
    shared = sum((times - 1) * cost(len(key) // TokenIds.dtype.itemsize) for key, times in repeated.items())
    return cost.per_micro_batch + sum(cost(len(sample)) for sample in samples) - shared


def _fill(families: Sequence[list[Sample]], num_bins: int, seq_len: int, cost: Cost) -> list[_Bin] | None:
    """Balanced bins, or None when the balancing order left no room for a family."""
    bins = [_Bin(room=seq_len) for _ in range(num_bins)]
    costs = [sum(cost(len(sample)) for sample in family) for family in families]
    for index in sorted(range(len(families)), key=costs.__getitem__, reverse=True):
        num_tokens = sum(map(len, families[index]))
        with_room = [b for b in bins if num_tokens <= b.room]
        if not with_room:
            return None
        cheapest = min(with_room, key=lambda b: b.cost)
        for sample in families[index]:
            cheapest.put(sample, cost(len(sample)))
    return bins


def _even_out(bins: Sequence[_Bin], cost: Cost) -> None:
    """Move the smallest sample of the dearest bin to the cheapest one, as long as both stay below what it cost."""
    while bins:
        dearest, cheapest = max(bins, key=lambda b: b.cost), min(bins, key=lambda b: b.cost)
        sample = min(dearest.samples, key=len, default=None)
        if sample is None or len(sample) > cheapest.room or cheapest.cost + cost(len(sample)) >= dearest.cost - 1e-9:
            return
        dearest.take(sample, cost(len(sample)))
        cheapest.put(sample, cost(len(sample)))


def _deal(bins: list[_Bin], num_ranks: int) -> list[list[MicroBatch]]:
    """Rows of `num_ranks` bins that cost alike, every other row backwards so that no rank always gets the dearest."""
    bins = sorted(bins, key=lambda b: b.cost, reverse=True)
    dealt: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    for row, start in enumerate(range(0, len(bins), num_ranks)):
        in_row = bins[start : start + num_ranks]
        for rank, chosen in enumerate(reversed(in_row) if row % 2 else in_row):
            dealt[rank].append(MicroBatch(tuple(chosen.samples)))
    return dealt
