from typing import Any

from numpy.typing import NDArray

def copy(target: NDArray[Any], source: NDArray[Any], most_store_bytes: int = 64, /) -> None:
    """Boxes of the same shape and item size, which do not overlap, with the widest stores that the processor has.

    Raises `ValueError` for other boxes, and where the innermost dim is not contiguous.
    """

def weighted_sum(box: NDArray[Any], start: tuple[int, ...], widest: int = 3, /) -> int:
    """`ductile.fabric.fingerprint.weighted_sum` of a box whose items are uint8, int16 or int32 and are contiguous along
    the last of at least one dim, modulo 2^52. Raises `ValueError` for other boxes.

    widest: the instructions that are used at most: 0 any, 1 AVX2, 2 AVX-512, 3 its 52-bit products."""

def copy_and_sum(target: NDArray[Any], box: NDArray[Any], start: tuple[int, ...], past_cache: bool = False, /) -> int:
    """Copy a box to one that does not overlap it, and return the `weighted_sum` of what was written, in one pass. The
    target may lie in columns. Raises `ValueError` for other boxes."""
