from typing import Any

from numpy.typing import NDArray

def copy(target: NDArray[Any], source: NDArray[Any], most_store_bytes: int = 64, /) -> None:
    """Boxes of the same shape and item size, which do not overlap, with the widest stores that the processor has.

    Raises `ValueError` for other boxes, and where the innermost dim is not contiguous.
    """
