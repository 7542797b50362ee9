"""Places among the tokens of a batch of documents that begin alike."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Tree:
    """Place of documents that begin alike: rows `start` to `stem`, then up to each of `ends` a branch."""

    start: int
    stem: int
    ends: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.ends[-1] if self.ends else self.stem

    @property
    def branches(self) -> list[tuple[int, int]]:
        """First row and end of each branch."""
        return list(pairwise((self.stem, *self.ends)))
