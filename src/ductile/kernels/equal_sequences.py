"""Sequences of one length that follow each other in a batch: one call of a kernel takes them all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor


@dataclass(frozen=True, slots=True)
class EqualSequences:
    """Tokens `start` to `end`: `num` sequences of one length."""

    start: int
    end: int
    num: int

    @property
    def length(self) -> int:
        """Tokens of each."""
        return (self.end - self.start) // self.num

    def heads_first(self, x: Tensor) -> Tensor:
        """[T, H, ...] -> [num, H, length, ...], in the same memory."""
        return x[self.start : self.end].unflatten(0, (self.num, -1)).transpose(1, 2)


def equal_sequences(lengths: Sequence[int], start: int = 0) -> Iterator[EqualSequences]:
    """Neighbours of one length among sequences of these lengths; the first begins at `start`, and none is empty."""
    for length, equal in groupby(lengths):
        num = len(list(equal))
        if length:
            yield EqualSequences(start, start + num * length, num)
        start += num * length
