"""The text of a layout: what it means, what is no such text, and that what is printed can be read again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.choice.layout_text import LayoutTextError, in_words, parse_sizes, spelled_sizes
from ductile.core.layout.geometry.parallel_layout import AXES, ParallelDims


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("pp=2,dp_shard=2,tp=2", {"pp": 2, "dp_shard": 2, "tp": 2}),
        (" tp = 4 ", {"tp": 4}),
        ("dp_shard=1", {"dp_shard": 1}),
    ],
)
def test_a_text_names_sizes_by_axis(text: str, sizes: dict[str, int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'nothing' is not axis=size. Write pp=2,dp_shard=2,tp=2, with axes of pp, dp_replicate, dp_shard, cp, tp"),
        ("tp2", "'tp2' is not axis=size"),
        ("dp=4", "'dp' is no axis: write dp_shard (shards of a copy) or dp_replicate (copies)"),
        ("dp_shards=4", "'dp_shards' is no axis: did you mean dp_shard?"),
        ("ep=4", "'ep' is no axis"),
        ("tp=2,tp=2", "tp is given twice"),
        ("tp=0", "tp is '0' and must be a whole number of at least 1"),
        ("tp=", "tp is 'nothing' and must be a whole number of at least 1"),
        ("tp=-2,x=1", "tp is '-2' and must be a whole number of at least 1; 'x' is no axis"),
        ("tp=99999999", "tp is '99999999' and must be"),
    ],
)
def test_what_is_no_layout_is_told_all_at_once_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(LayoutTextError) as caught:
        parse_sizes(text)
    assert str(caught.value).startswith(says)
    assert "Write pp=2,dp_shard=2,tp=2" in str(caught.value)


@given(st.fixed_dictionaries({axis: st.integers(1, 9) for axis in AXES}))
def test_what_is_printed_can_be_read_again(sizes: dict[str, int]) -> None:
    dims = ParallelDims(**sizes)
    assert ParallelDims(**parse_sizes(spelled_sizes(dims))) == dims


def test_words_are_for_people() -> None:
    assert in_words(ParallelDims(pp=2, dp_shard=4, tp=2)) == "pp 2 · dp_shard 4 · tp 2"
    assert in_words(ParallelDims()) == ""
