"""Which sequences run in the next step, and how many tokens of each. No tensors, no clock.

1. Sequences that decode go first, one token each. When no block is left for one of them, the last in order loses its
   blocks and waits (it is recomputed later), until there is one.
2. What is left of the token budget goes to prefills under way, then to waiting sequences, in order, as long as there
   is a place, budget, and blocks for all their known tokens and one more. One that came with a cache from another
   engine computes only what that lacks: the blocks are to be filled from it before the step runs (`kv_imports`).
3. Full blocks are registered when they are scheduled: the step writes keys and values before it reads them, so the
   members of a group that start together share their prompt's blocks already.

The first in order always advances: it is never the one that loses its blocks while another holds any, and a sequence
that cannot fit alone is refused before it comes here.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from ductile.generator.engine.kv_cache import BlockPool, extend_keys
from ductile.generator.engine.kv_transfer import RequestKV
from ductile.generator.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start : start + count` of a sequence."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    def blocks(self, block_size: int) -> list[int]:
        """Blocks that hold the chunk's tokens and all before them."""
        return self.sequence.blocks[: -(-self.end // block_size)]

    @property
    def reaches_the_end(self) -> bool:
        """Return whether the next token can be sampled after this chunk."""
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class KVImport:
    """Tokens `start : end` of a cache that came with a sequence go into its blocks."""

    sequence: Sequence
    cache: RequestKV
    start: int
    end: int


class Scheduler:
    def __init__(
        self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int, share_prefixes: bool = True
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.share_prefixes = share_prefixes
        self.running: list[Sequence] = []
        """Sequences that hold blocks, sorted by `Sequence.order` as `waiting` is."""
        self.waiting: list[Sequence] = []
        self.kv_imports: list[KVImport] = []
        """Imports that must be done before the step that was scheduled last."""
        self.num_preempted = 0
        self._weights_serial = 0
        """Number of the live weights, counted from 0 at each change: prefix keys of other weights are others."""

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended; its blocks are free."""
        if sequence.blocks:
            _take_out(self.running, sequence)
            self._release(sequence)
        else:
            _take_out(self.waiting, sequence)

    def weights_changed(self, keep_cache: bool) -> None:
        """What is in the cache belongs to older weights. Running sequences compute theirs again, or keep it."""
        self._weights_serial += 1
        for sequence in self.waiting:
            sequence.imported = None
        if not keep_cache:
            while self.running:
                self._back_to_waiting(self.running[-1])

    def is_pure(self, sequence: Sequence) -> bool:
        """Return whether all that a sequence has in its blocks was computed under the live weights."""
        return sequence.weights_serial == self._weights_serial

    def schedule(self) -> list[Chunk]:
        """The next step's chunks; empty only when nothing runs or waits."""
        chunks: list[Chunk] = []
        self.kv_imports = []
        budget = self.max_num_batched_tokens
        preempted_before = self.num_preempted
        for sequence in [s for s in self.running if s.num_pending == 1]:
            if budget == 0:
                break
            if self._room_to_decode(sequence):
                chunks.append(self._take(sequence, 1))
                budget -= 1
        for sequence in self.running:
            if budget and sequence.num_pending > 1:
                chunks.append(self._take(sequence, min(budget, sequence.num_pending)))
                budget -= chunks[-1].count
        if self.num_preempted == preempted_before:
            while budget and self.waiting and len(self.running) < self.max_num_seqs and self._admit(self.waiting[0]):
                sequence = self.waiting.pop(0)
                insort(self.running, sequence, key=_order)
                chunks.append(self._take(sequence, min(budget, sequence.num_pending)))
                budget -= chunks[-1].count
        return chunks

    def _room_to_decode(self, sequence: Sequence) -> bool:
        """Make sure that the last token has a place in the cache. False when `sequence` itself had to give way."""
        if not sequence.blocks:  # it gave way to an earlier one of this step
            return False
        while sequence.num_computed >= len(sequence.blocks) * self.pool.block_size:
            if self.pool.num_free:
                sequence.blocks += self.pool.allocate(1)
            else:
                victim = self.running[-1]
                self._back_to_waiting(victim)
                self.num_preempted += 1
                if victim is sequence:
                    return False
        return True

    def _admit(self, sequence: Sequence) -> bool:
        """Give a sequence blocks for all known tokens, shared ones where there are, or none when there are too few."""
        shared: list[int] = []
        if self.share_prefixes:
            sequence.keys.clear()
            self._extend_keys(sequence)
            num_useful = sequence.num_reusable // self.pool.block_size
            shared = self.pool.find(sequence.keys[:num_useful])
        num_needed = self.pool.blocks_for(len(sequence.tokens))
        with_next = self.pool.blocks_for(len(sequence.tokens) + 1)
        if not self.pool.can_allocate(shared, with_next - len(shared)):
            return False
        self.pool.touch(shared)
        sequence.blocks = shared + self.pool.allocate(num_needed - len(shared))
        sequence.num_computed = len(shared) * self.pool.block_size
        sequence.num_registered = len(shared)
        sequence.weights_serial = self._weights_serial
        cache, sequence.imported = sequence.imported, None
        if cache:
            end = min(cache.num_tokens, sequence.num_reusable)
            if end > sequence.num_computed:
                self.kv_imports.append(KVImport(sequence, cache, sequence.num_computed, end))
                sequence.num_computed = end
        return True

    def _take(self, sequence: Sequence, count: int) -> Chunk:
        chunk = Chunk(sequence, sequence.num_computed, count)
        sequence.num_computed += count
        if self.share_prefixes and self.is_pure(sequence):
            num_full = sequence.num_computed // self.pool.block_size
            if num_full > sequence.num_registered:
                self._extend_keys(sequence)
                for index in range(sequence.num_registered, num_full):
                    self.pool.register(sequence.blocks[index], sequence.keys[index])
                sequence.num_registered = num_full
        return chunk

    def _extend_keys(self, sequence: Sequence) -> None:
        salt = sequence.request.cache_salt
        extend_keys(sequence.keys, sequence.tokens, self.pool.block_size, self._weights_serial, salt)

    def _back_to_waiting(self, sequence: Sequence) -> None:
        _take_out(self.running, sequence)
        self._release(sequence)
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_registered = 0
        sequence.weights_serial = -1


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _take_out(sequences: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence from a sorted list by bisection, as a hundred thousand may be aborted at once."""
    del sequences[bisect_left(sequences, sequence.order, key=_order)]
