"""Copies between boxes in memory, and sums over them: by the compiled part of ductile (`boxes.c`) where it is there.

    copy(target, source)    large ones past the cache
    weighted_sum(...)       at addresses: what a box costs beside its bytes counts where there are thousands
    copy_and_sum([...])     many boxes in one call; both return None for a box, having done nothing, where the compiled
                            part cannot, or is not there

A box that tensor parallelism cuts out of a row-parallel weight is a thousand rows of 1 to 6 KB. numpy copies them one
by one through the cache, at half the speed of memory. One long piece it leaves to the C library, which goes past the
cache only from a size on that depends on the machine: here 100 MB are not enough, unless `GLIBC_TUNABLES` says so.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

try:
    import ductile.fabric._boxes as _boxes  # pyright: ignore[reportMissingModuleSource] (not built without a compiler)
except ModuleNotFoundError:
    _boxes = None

# Measured on one core of a Xeon with AVX-512 and 2 MiB of L2 cache.
LEAST_BYTES = 1 << 19
"""Least box that is copied past the cache. Smaller ones are better copied in it. From here on a copy and one pass over
the result take as long either way; without the pass, as in a transfer, and on huge pages, numpy copies 4.5 GB/s in rows
of a KiB, 5.3 in rows of 2.75 KiB and 6.9 in one piece, this 8.3, 9.5 and 12.3."""
LEAST_ROW_BYTES = 256
"""Least rows that are copied past the cache. On small pages numpy copies them at 4.3 GB/s and this at 5.1, rows of half
that at 3.4 and 3.6."""


class BoxCopy(NamedTuple):
    """A box to be copied, both ends in this process's memory: by their addresses, which keep nothing alive."""

    target: int
    target_strides: tuple[int, ...] | None
    """Strides in items; None: it lies in one piece."""
    source: int
    source_strides: tuple[int, ...] | None
    shape: tuple[int, ...]
    item_bytes: int
    start: tuple[int, ...]
    """Index in its tensor at which the box begins."""


def built() -> bool:
    """Return whether boxes can be copied past the cache: the C extension is there."""
    return _boxes is not None


def copy(target: NDArray[Any], source: NDArray[Any], least_bytes: int = LEAST_BYTES) -> None:
    """Copy a box to one of the same shape and dtype that does not overlap it. Boxes of `least_bytes` and more go past
    the cache; less than the default is for a source that is in the cache."""
    row_bytes = contiguous_bytes(target.shape, (target.strides, source.strides), target.itemsize)
    if _boxes is not None and streams(target.nbytes, row_bytes, least_bytes):
        _boxes.copy(target, source)
    else:
        np.copyto(target, source)


def _cannot(*_: Any) -> None:
    return None


def _cannot_copy(copies: list[BoxCopy], _past_cache: bool) -> list[int | None]:
    return [None] * len(copies)


weighted_sum = _boxes.weighted_sum if _boxes is not None else _cannot
copy_and_sum = _boxes.copy_and_sum if _boxes is not None else _cannot_copy


def streams(num_bytes: int, row_bytes: int, least_bytes: int = LEAST_BYTES) -> bool:
    """Return whether a box in such rows is copied faster past the cache."""
    return num_bytes >= least_bytes and row_bytes >= LEAST_ROW_BYTES


def contiguous_bytes(shape: Sequence[int], all_strides: Sequence[Sequence[int]], item_bytes: int) -> int:
    """Bytes that lie in one piece in all of several boxes of one shape; the strides are in bytes."""
    row_bytes = item_bytes
    for dim in reversed(range(len(shape))):
        if shape[dim] > 1 and any(strides[dim] != row_bytes for strides in all_strides):
            break
        row_bytes *= shape[dim]
    return row_bytes
