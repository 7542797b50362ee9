from typing import Any

from numpy.typing import NDArray

from ductile.fabric.boxes import BoxCopy

def copy(target: NDArray[Any], source: NDArray[Any], most_store_bytes: int = 64, /) -> None:
    """Boxes of the same shape and item size, which do not overlap, with the widest stores that the processor has.

    Raises `ValueError` for other boxes, and where the innermost dim is not contiguous.
    """

def weighted_sum(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    item_bytes: int,
    start: tuple[int, ...],
    widest: int = 3,
    /,
) -> int | None:
    """Return `ductile.fabric.fingerprint.weighted_sum` of a box in this process's memory that begins at index `start`
    of its tensor, modulo 2^52. None for a box that is not known here: its items are of 1, 2 or 4 bytes, and side by
    side along one of its dims.

    strides: in items. widest: instructions used at most: 0 any, 1 AVX2, 2 AVX-512, 3 its 52-bit products."""

def copy_and_sum(copies: list[BoxCopy], past_cache: bool, /) -> list[int | None]:
    """Copy boxes to targets that do not overlap them, one after the other, and return the `weighted_sum` of each as it
    was written, in one pass. None, with nothing copied, for a box with which that cannot be done.

    past_cache: nobody reads the targets soon."""
