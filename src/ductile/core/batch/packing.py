"""Which rank runs which samples together.

Samples have very different lengths, and all ranks meet at every micro-batch, so that each waits for the slowest.

1. A sample costs its tokens plus a quadratic term for attention (`Cost`).
2. First-fit decreasing says how few micro-batches hold everything; rounded up to equally many a rank.
3. Samples, dearest first, go to the cheapest micro-batch that has room.
4. Micro-batches, dearest first, are dealt out in rows of one a rank: those that run at the same time cost alike, and
   the largest come first, so that a job that runs out of memory does so at once.

Any number of ranks works. Where samples do not suffice, a rank gets empty micro-batches: its turn in the collectives.
The result is a function of the samples and the number of ranks alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ductile.records import MicroBatch, Sample


class SampleTooLong(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class Cost:
    """Relative time of one sample's forward and backward pass: `tokens + per_pair * tokens^2`."""

    per_pair: float = 1 / 12_288
    """A layer of width M takes about 24 M^2 operations a token and 2 M a pair of tokens (causal): 1/(12 M); this is
    the one for M = 1024."""

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


def pack(samples: Sequence[Sample], num_ranks: int, seq_len: int, cost: Cost | None = None) -> list[list[MicroBatch]]:
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
    rows = -(-_num_bins_needed(dearest_first, seq_len) // num_ranks)
    while (bins := _fill(dearest_first, rows * num_ranks, seq_len, cost)) is None:
        rows += 1  # ends at the latest with one sample a micro-batch
    return _deal(bins, num_ranks)


def _num_bins_needed(dearest_first: Sequence[Sample], seq_len: int) -> int:
    """By first-fit decreasing: at most 11/9 of the best possible."""
    rooms: list[int] = []
    for sample in dearest_first:
        for index, room in enumerate(rooms):
            if len(sample) <= room:
                rooms[index] -= len(sample)
                break
        else:
            rooms.append(seq_len - len(sample))
    return len(rooms)


def _fill(dearest_first: Sequence[Sample], num_bins: int, seq_len: int, cost: Cost) -> list[_Bin] | None:
    """Balanced bins, or None when the balancing order left no room for a sample."""
    bins = [_Bin(room=seq_len) for _ in range(num_bins)]
    for sample in dearest_first:
        with_room = [b for b in bins if len(sample) <= b.room]
        if not with_room:
            return None
        min(with_room, key=lambda b: b.cost).put(sample, cost(len(sample)))
    return bins


def _deal(bins: list[_Bin], num_ranks: int) -> list[list[MicroBatch]]:
    """Rows of `num_ranks` bins that cost alike, every other row backwards so that no rank always gets the dearest."""
    bins = sorted(bins, key=lambda b: b.cost, reverse=True)
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    for row, start in enumerate(range(0, len(bins), num_ranks)):
        in_row = bins[start : start + num_ranks]
        for rank, chosen in enumerate(reversed(in_row) if row % 2 else in_row):
            ranks[rank].append(MicroBatch(tuple(chosen.samples)))
    return ranks
