"""Which attention heads a tp slot has.

Query heads are dealt out in equal chunks; a slot has the key/value heads that its query heads read. So with fewer of
these than slots, neighbours have the same one:

    heads_on(spec, 4, 3)     of 8 query and 2 key/value heads: queries 6 and 7, which read key 1, as 4 and 5 do
"""

from dataclasses import dataclass

from ductile.core.layout.geometry.sharding import units_of
from ductile.core.layout.model.spec import ModelSpec


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
    def readers(self) -> tuple[int, ...]:
        """How many of the slot's query heads read each of its key heads. In the whole model it is the same number
        everywhere; a slot's chunk may begin or end in the middle of those of a key."""
        each = self.queries_per_key
        bounds = [(max(key * each, self.queries.start), min((key + 1) * each, self.queries.stop)) for key in self.keys]
        return tuple(stop - start for start, stop in bounds)


def heads_on(spec: ModelSpec, size: int, coordinate: int) -> Heads:
    """Heads of the slot at this coordinate of a tp axis of this size."""
    queries, keys = units_of((spec.num_heads, spec.num_kv_heads), size, coordinate)
    return Heads(queries, keys, spec.num_heads // spec.num_kv_heads)


def share_key_heads(spec: ModelSpec, size: int) -> bool:
    """Return whether slots of a tp axis of this size have a key head in common."""
    return sum(len(heads_on(spec, size, coordinate).keys) for coordinate in range(size)) > spec.num_kv_heads
