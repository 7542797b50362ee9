"""Places in memory at which values begin."""

ALIGNMENT_BYTES = 64
"""Bytes of a cache line, and of the widest vector load: a value that begins at a multiple of this can be viewed in any
dtype, and is copied in whole lines."""


def aligned(num_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Return the first multiple of the alignment that is not below `num_bytes`: where the next value begins behind so
    many bytes."""
    return -(-num_bytes // alignment_bytes) * alignment_bytes
