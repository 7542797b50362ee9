"""The pool against a twin that keeps no index, no order and no counts, but looks everything up by searching."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.generator.engine.kv_cache import BlockPool, extend_keys
from tests.nightly import examples


class Twin:
    """Who holds what, as plain lists: `holdings[i]` are the blocks of holder i."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.holdings: list[list[int]] = []

    def holders(self, block: int) -> int:
        return sum(holding.count(block) for holding in self.holdings)

    @property
    def free(self) -> set[int]:
        return {block for block in range(self.num_blocks) if not self.holders(block)}


CONTENTS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
"""A holder's tokens, one a block. Two values make shared beginnings common."""


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(2, 8), st.lists(st.one_of(CONTENTS, st.integers(0, 5)), max_size=40))
def test_pool_agrees_with_its_twin(num_blocks: int, actions: list[list[int] | int]) -> None:
    """A list of tokens becomes a holder when it fits; a number lets that holder go."""
    pool, twin = BlockPool(num_blocks, block_size=1), Twin(num_blocks)
    written: dict[int, tuple[int, ...]] = {}
    """What each block contains: all tokens up to its own."""
    for action in actions:
        if isinstance(action, int):
            if action < len(twin.holdings):
                pool.release(twin.holdings.pop(action))
        else:
            keys: list[bytes] = []
            extend_keys(keys, action, 1, version=0)
            shared = pool.find(keys)
            for index, block in enumerate(shared):
                assert written[block] == tuple(action[: index + 1]), "found a block of other content"
            num_new = len(action) - len(shared)
            fits = num_new <= len(twin.free - set(shared))
            assert pool.can_allocate(shared, num_new) is fits
            if fits:
                pool.touch(shared)
                new = pool.allocate(num_new)
                assert twin.free >= set(new), "gave a block that somebody holds"
                assert not set(new) & set(shared)
                blocks = shared + new
                twin.holdings.append(blocks)
                for index, (block, key) in enumerate(zip(blocks, keys, strict=True)):
                    written[block] = tuple(action[: index + 1])
                    pool.register(block, key)
        assert pool.num_free == len(twin.free)
    for holding in twin.holdings:
        pool.release(holding)
    assert pool.num_free == num_blocks


def test_released_blocks_are_found_until_they_are_needed() -> None:
    pool = BlockPool(4, 1)
    keys: list[bytes] = []
    extend_keys(keys, [7, 8, 9], 1, version=0)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    pool.release(blocks)
    assert pool.find(keys) == blocks
    pool.allocate(2)  # the block that was never used, then the end of the sequence
    assert pool.find(keys) == blocks[:2]


def test_keys_depend_on_everything_before_and_on_the_weights() -> None:
    def last(tokens: list[int], version: int) -> bytes:
        keys: list[bytes] = []
        extend_keys(keys, tokens, 2, version)
        return keys[-1]

    assert last([1, 2, 3, 4], 0) == last([1, 2, 3, 4, 5], 0)
    different = [last([1, 2, 3, 4], 0), last([1, 2, 3, 4], 1), last([1, 3, 3, 4], 0), last([3, 4], 0), last([1, 2], 0)]
    assert len(set(different)) == len(different)


def test_misuse_is_an_error() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(2)
    with pytest.raises(RuntimeError, match="asked for 1 of 0 free blocks"):
        pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="released more often than held"):
        pool.release(blocks)
