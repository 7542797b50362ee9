"""Who holds which block of the KV cache: reference counts, sharing by content, eviction. There are no tensors here.

1. A block is the keys and values of `block_size` consecutive tokens in every layer; sequences hold lists of blocks.
2. A full block may be registered under its content key: a digest of all tokens from the first to its last, and of the
   weights' version. A sequence that starts with the same tokens under the same weights takes it as it is.
3. A block that no sequence holds is free. It keeps its key, and can be found again, until `allocate` needs it: least
   recently released first, the end of a sequence before its beginning.

At any time each block is either free or held, never both; counts equal the number of holders; a key names one block.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest registered beginning of `keys`. They have no new holder yet: see `touch`."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def can_allocate(self, shared: Sequence[int], num_new: int) -> bool:
        """Return whether `touch(shared)` and then `allocate(num_new)` would succeed."""
        return num_new + sum(block in self._free for block in shared) <= self.num_free

    def touch(self, blocks: Iterable[int]) -> None:
        """Become one more holder of blocks that `find` returned."""
        for block in blocks:
            self._free.pop(block, None)
            self._holders[block] += 1

    def allocate(self, num: int) -> list[int]:
        """Take free blocks; what they contained is lost. Ask `can_allocate` first."""
        if num > self.num_free:
            raise RuntimeError(f"asked for {num} of {self.num_free} free blocks")
        taken: list[int] = []
        for _ in range(num):
            block, _ = self._free.popitem(last=False)
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
            self._holders[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Hold these, a sequence's blocks in order, no longer."""
        for block in reversed(blocks):
            if self._holders[block] == 0:
                raise RuntimeError(f"block {block} was released more often than held")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._key_of:  # no sequence can find it again, so it goes before those that can be
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, key: bytes) -> None:
        """Let others find a held, full block. When the same content is registered already, that one stays."""
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key


def extend_keys(keys: list[bytes], tokens: Sequence[int], block_size: int, version: int, salt: str = "") -> None:
    """Append to `keys` until there is one for every full block of `tokens`. salt: of the request; sequences of
    different salts have no key in common."""
    while (end := (len(keys) + 1) * block_size) <= len(tokens):
        parent = keys[-1] if keys else version.to_bytes(8, "little") + salt.encode()
        content = array("q", tokens[end - block_size : end]).tobytes()
        keys.append(hashlib.blake2b(parent + content, digest_size=16).digest())
