"""Where the next value begins."""

from hypothesis import given
from hypothesis import strategies as st

from ductile.fabric.alignment import ALIGNMENT_BYTES, aligned


@given(st.integers(0, 1 << 60), st.sampled_from([1, 3, 16, 64, 512, 4096]))
def test_it_is_the_first_multiple_that_is_not_below(num_bytes: int, alignment_bytes: int) -> None:
    begins = aligned(num_bytes, alignment_bytes)
    assert begins % alignment_bytes == 0
    assert 0 <= begins - num_bytes < alignment_bytes


def test_without_an_alignment_it_is_a_line_of_the_cache() -> None:
    assert [aligned(num_bytes) for num_bytes in (0, 1, ALIGNMENT_BYTES, ALIGNMENT_BYTES + 1)] == [0, 64, 64, 128]
