from typing import Any

from numpy.typing import NDArray

def copy(target: NDArray[Any], source: NDArray[Any], most_store_bytes: int = 64, /) -> None:
    """Boxes of the same shape and item size, which do not overlap, with the widest stores that the processor has.

    Raises `ValueError` for other boxes, and where the innermost dim is not contiguous.
    """

def weighted_sum(box: NDArray[Any], start: tuple[int, ...], /) -> int:
    """`ductile.fabric.fingerprint.weighted_sum` of a box whose items are uint8, int16 or int32 and are contiguous along
    the last of at least one dim, modulo 2^64. Raises `ValueError` for other boxes."""
