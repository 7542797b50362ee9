import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.batch.chunking import MOST, ReadyGroup, chunk, shares


def take(tokens: list[int], wanted: int, *, in_group: int = 1, num_ranks: int = 1, per_rank: int = 1, **given) -> int:
    ready = [ReadyGroup(in_group, number) for number in tokens]
    given = {"groups_per_update": 16, "seq_len": 100, **given}
    return chunk(ready, wanted=wanted, num_ranks=num_ranks, per_rank=per_rank, **given)


@pytest.mark.parametrize(
    ("ready", "wanted", "num_ranks", "taken", "why"),
    [
        ([], 16, 1, 0, "nothing is there"),
        ([10], 16, 1, 0, "neither a full micro-batch nor a quarter of the groups"),
        ([100], 16, 1, 1, "one full micro-batch"),
        ([100], 16, 2, 0, "not one for every rank"),
        ([60, 60, 80], 16, 2, 3, "one for every rank"),
        ([10, 10, 10, 10], 16, 1, 4, "a quarter of the groups"),
        ([10, 10, 10, 10], 16, 5, 0, "a quarter of the groups, and not a sample for every rank"),
        ([10], 1, 1, 1, "all that is wanted"),
        ([10], 1, 5, 1, "all that is wanted, though some ranks have nothing"),
        ([10, 10], 1, 1, 1, "no more than is wanted"),
        ([100] * 16, 16, 1, 4, "at most four full micro-batches"),
        ([1000, 10], 16, 1, 1, "a group larger than that goes alone"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_chunk(ready, wanted, num_ranks, taken, why):
    assert take(ready, wanted, num_ranks=num_ranks) == taken


@pytest.mark.parametrize(
    ("ready", "wanted", "in_group", "num_ranks", "taken", "why"),
    [
        ([100] * 7, 16, 8, 1, 7, "a quarter of the groups with enough samples"),
        ([100] * 7, 40, 8, 1, 0, "seven full micro-batches, and no quarter"),
        ([100] * 8, 40, 8, 1, 8, "a full message"),
        ([100] * 8, 40, 8, 2, 0, "not one for each rank"),
        ([10] * 4, 16, 2, 1, 4, "a quarter of the groups, with a sample for each of eight micro-batches"),
        ([10] * 4, 16, 1, 1, 0, "fewer samples would leave stages waiting"),
        ([10] * 2, 2, 1, 1, 2, "all that is wanted"),
        ([100] * 40, 40, 8, 1, 16, "at most two messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_pipeline_of_two_stages_takes_eight_micro_batches_a_rank(ready, wanted, in_group, num_ranks, taken, why):
    update = {"groups_per_update": max(16, wanted)}
    assert take(ready, wanted, in_group=in_group, num_ranks=num_ranks, per_rank=8, **update) == taken


@pytest.mark.parametrize(
    ("ready", "wanted", "soon", "taken", "why"),
    [
        ([10, 10, 10, 10], 16, 1, 0, "a quarter waits for what comes in a moment"),
        ([10, 10, 10, 10], 16, 0, 4, "and does not where nothing comes"),
        ([60, 40], 16, 3, 2, "a full micro-batch waits for nobody"),
        ([10, 10], 2, 3, 2, "nor does all that is wanted"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_comes_soon(ready, wanted, soon, taken, why):
    assert take(ready, wanted, soon=soon) == taken


@given(
    st.lists(st.integers(1, 500), max_size=30),
    st.integers(1, 30),
    st.integers(1, 4),
    st.sampled_from([1, 2, 8, 16]),
    st.integers(1, 200),
    st.integers(0, 10),
)
def test_a_chunk_is_there_wanted_not_too_large_and_comes_in_the_end(ready, wanted, num_ranks, per_rank, seq_len, more):
    given = {"groups_per_update": wanted + more, "seq_len": seq_len}
    taken = take(ready, wanted, num_ranks=num_ranks, per_rank=per_rank, **given)
    assert taken <= min(wanted, len(ready))
    assert taken <= 1 or sum(ready[:taken]) <= max(MOST, 2 * per_rank) * num_ranks * seq_len
    if len(ready) >= wanted:
        assert taken >= 1, "everything that is wanted is there, and it waits"


@given(st.integers(1, 50), st.integers(1, 50))
def test_shares_are_all_groups_as_even_as_can_be(num_groups, num_updates):
    if num_updates > num_groups:
        with pytest.raises(ValueError, match="n_minibatches"):
            shares(num_groups, num_updates)
        return
    parts = shares(num_groups, num_updates)
    assert sum(parts) == num_groups
    assert len(parts) == num_updates
    assert max(parts) - min(parts) <= 1
