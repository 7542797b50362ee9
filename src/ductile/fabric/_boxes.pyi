from typing import Any

from numpy.typing import NDArray

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
    """`ductile.fabric.boxes.weighted_sum`.

    widest: the instructions that are used at most: 0 any, 1 AVX2, 2 AVX-512, 3 its 52-bit products."""

def copy_and_sum(
    target: int,
    target_strides: tuple[int, ...],
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    item_bytes: int,
    start: tuple[int, ...],
    past_cache: bool,
    /,
) -> int | None:
    """`ductile.fabric.boxes.copy_and_sum`."""
