"""Blocks of rows that stay in a core's cache.

A chain of elementwise steps over a large tensor goes through memory at every step. Taken a block of rows at a time,
only its first step reads memory and only its last one writes it: on a CPU that is most of the time of such a chain.
"""

from collections.abc import Iterator

from torch import Tensor

BLOCK_BYTES = 1 << 18
"""Bytes of the widest tensor in a block. A few such blocks together fit in the 1 or 2 MiB of cache that a core has for
itself."""


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor, all of which have equally many; all rows at once on a GPU. Views, not copies."""
    if tensors[0].device.type != "cpu":
        return iter((tensors,))
    total_rows = len(tensors[0])
    widest = max(x.nbytes for x in tensors) // max(1, total_rows)
    num_rows = max(1, BLOCK_BYTES // max(1, widest))
    if total_rows <= num_rows:
        return iter((tensors,))
    return zip(*(x.split(num_rows) for x in tensors), strict=True)
