from typing import Any

from numpy.typing import NDArray

def copy(target: NDArray[Any], source: NDArray[Any], most_store_bytes: int = 64, /) -> None:
    """Boxes of the same shape and item size, which do not overlap, with the widest stores that the processor has.

    Raises `ValueError` for other boxes, and where the innermost dim is not contiguous.
    """

def weighted_sum(box: NDArray[Any], weights: tuple[NDArray[Any], ...], /) -> int:
    """The sum modulo 2^64 over a box's items (uint8, int16 or int32, contiguous along the last of at least one dim) of
    the item times each dim's weight (64 bits, contiguous) at its index. Raises `ValueError` for other boxes."""
