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
    """Return `ductile.fabric.fingerprint.weighted_sum` of a box in this process's memory that begins at index `start`
    of its tensor, modulo 2^52. None for a box that is not known here: its items are of 1, 2 or 4 bytes, and side by
    side along one of its dims.

    strides: in items. widest: instructions used at most: 0 any, 1 AVX2, 2 AVX-512, 3 its 52-bit products."""

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
    """Copy a box to a target that does not overlap it, and return the `weighted_sum` of what was written, in one pass.
    None, with nothing copied, where that cannot be done. All else as in `weighted_sum`.

    past_cache: nobody reads the target soon."""
