"""Which attention heads a tp slot has, and who else has them.

Query heads are dealt out in equal chunks; a slot has the key/value heads that its query heads read. So with fewer of
these than slots, neighbours have the same one:

    heads_on(spec, 4, 3)     of 8 query and 2 key/value heads: queries 6 and 7, which read key 1
    sharers(spec, 4, 3)      {(2, 3): (1,)}: slots 2 and 3 both have key 1
"""

from dataclasses import dataclass

from ductile.core.layout.sharding import units_of
from ductile.core.layout.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one tp slot, as numbers of the whole model's heads."""

    queries: range
    keys: range
    queries_per_key: int
    """Query heads that read one key head in the whole model."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of query, key and value heads."""
        return len(self.queries), len(self.keys), len(self.keys)

    @property
    def read(self) -> tuple[int, ...]:
        """Place, among the slot's own, of the key head that each of its query heads reads."""
        return tuple(query // self.queries_per_key - self.keys.start for query in self.queries)

    @property
    def even(self) -> bool:
        """Whether equally many query heads, one after the other, read each key head, as in the whole model."""
        each = len(self.queries) // max(1, len(self.keys))
        return self.read == tuple(key for key in range(len(self.keys)) for _ in range(each))


def heads_on(spec: ModelSpec, size: int, coordinate: int) -> Heads:
    """Heads of the slot at this coordinate of a tp axis of this size."""
    queries, keys = units_of((spec.num_heads, spec.num_kv_heads), size, coordinate)
    return Heads(queries, keys, spec.num_heads // spec.num_kv_heads)


def sharers(spec: ModelSpec, size: int, coordinate: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Key heads of a slot that others have too, by the coordinates of all that have them: both in ascending order."""
    held = [heads_on(spec, size, other).keys for other in range(size)]
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for key in held[coordinate]:
        having = tuple(other for other, keys in enumerate(held) if key in keys)
        if len(having) > 1:
            found[having] = (*found.get(having, ()), key)
    return found
