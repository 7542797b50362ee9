"""Every sample once, nothing over budget, equal counts, balanced."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ductile.core.batch.packing import Cost, SampleTooLong, pack, split_by_tokens
from ductile.core.layout.geometry.pipeline_schedule import PipelineShape
from ductile.records import MicroBatch, Sample
from tests.nightly import examples

SEQ_LEN = 64


def samples_of(lengths: list[int]) -> list[Sample]:
    """Distinguishable: the first token is the sample's index."""
    return [Sample((index,) + (0,) * (n - 1), loss_mask=(False,) * n) for index, n in enumerate(lengths)]


def cost_of(micro_batch: MicroBatch, cost: Cost) -> float:
    return sum(cost(len(sample)) for sample in micro_batch.samples)


lengths_lists = st.lists(st.integers(1, SEQ_LEN), max_size=60)


@given(lengths=lengths_lists, num_ranks=st.integers(1, 9))
@settings(deadline=None)
def test_each_sample_is_packed_exactly_once_within_the_budget(lengths: list[int], num_ranks: int) -> None:
    samples = samples_of(lengths)
    ranks = pack(samples, num_ranks, SEQ_LEN)
    packed = [sample for rank in ranks for micro_batch in rank for sample in micro_batch.samples]
    assert Counter(packed) == Counter(samples)
    assert all(micro_batch.num_tokens <= SEQ_LEN for rank in ranks for micro_batch in rank)
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1


@given(lengths=lengths_lists, num_ranks=st.integers(1, 9), per_pair=st.floats(0, 1))
@settings(deadline=None)
def test_no_sample_wants_to_move(lengths: list[int], num_ranks: int, per_pair: float) -> None:
    """Greedy balance: a micro-batch without its cheapest sample costs no more than any other that had room for it."""
    cost = Cost(per_pair)
    bins = [micro_batch for rank in pack(samples_of(lengths), num_ranks, SEQ_LEN, cost) for micro_batch in rank]
    for one in bins:
        for other in bins:
            if one is other or not one.samples:
                continue
            last = min(len(sample) for sample in one.samples)
            if SEQ_LEN - other.num_tokens >= last:
                assert cost_of(one, cost) - cost(last) <= cost_of(other, cost) + 1e-6


@given(lengths=lengths_lists, num_ranks=st.integers(1, 9))
@settings(deadline=None)
def test_ranks_differ_by_less_than_one_micro_batch(lengths: list[int], num_ranks: int) -> None:
    cost = Cost()
    ranks = pack(samples_of(lengths), num_ranks, SEQ_LEN, cost)
    costs = [[cost_of(micro_batch, cost) for micro_batch in rank] for rank in ranks]
    totals = [sum(rank) for rank in costs]
    assert max(totals) - min(totals) <= max((max(rank, default=0.0) for rank in costs), default=0.0) + 1e-6


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7))
@settings(deadline=None, max_examples=examples(60))
def test_not_more_micro_batches_than_one_above_the_fewest_possible(lengths: list[int]) -> None:
    """Against a dumb twin that tries every partition."""
    (rank,) = pack(samples_of(lengths), 1, 12)
    assert len(rank) <= fewest_bins(lengths, 12) + 1


def fewest_bins(lengths: list[int], room: int) -> int:
    if not lengths:
        return 0
    first, rest = lengths[0], lengths[1:]
    best = len(lengths)
    for size in range(len(rest) + 1):
        for beside in combinations(range(len(rest)), size):
            if first + sum(rest[i] for i in beside) <= room:
                others = [n for i, n in enumerate(rest) if i not in beside]
                best = min(best, 1 + fewest_bins(others, room))
    return best


def test_the_dearest_come_first_and_meet_each_other() -> None:
    ranks = pack(samples_of([60, 58, 10, 9]), 2, 64)
    assert [[micro_batch.num_tokens for micro_batch in rank] for rank in ranks] == [[60, 9], [58, 10]] or [
        [micro_batch.num_tokens for micro_batch in rank] for rank in ranks
    ] == [[60, 10], [58, 9]]


def test_fewer_samples_than_ranks_leaves_empty_micro_batches() -> None:
    ranks = pack(samples_of([5, 4]), 4, 64)
    assert [[micro_batch.num_tokens for micro_batch in rank] for rank in ranks] == [[5], [4], [0], [0]]


def test_nothing_to_pack() -> None:
    assert pack([], 3, 64) == [[], [], []]


def test_a_sample_that_never_fits_is_named() -> None:
    with pytest.raises(SampleTooLong, match=r"sample 1 has 65 tokens and seq_len is 64"):
        pack(samples_of([3, 65]), 2, 64)


def completions(prompt: int, lengths: list[int]) -> list[Sample]:
    """Samples of a prompt of 4 tokens, and that many in all."""
    return [
        Sample((prompt,) * 4 + (index,) * (n - 4), (False,) * 4 + (True,) * (n - 4)) for index, n in enumerate(lengths)
    ]


def prompts_in(micro_batch: MicroBatch) -> set[int]:
    return {sample.token_ids[0] for sample in micro_batch.samples}


def test_completions_of_one_prompt_stay_together_where_that_costs_no_balance() -> None:
    samples = [sample for prompt in range(4) for sample in completions(prompt, [8, 8, 8, 8])]
    for num_ranks in (1, 2, 4):
        ranks = pack(samples[::2] + samples[1::2], num_ranks, 32)
        in_each = [prompts_in(micro_batch) for rank in ranks for micro_batch in rank]
        assert sorted(map(len, in_each)) == [1, 1, 1, 1]


def test_balance_goes_before_keeping_together() -> None:
    ranks = pack(completions(0, [8] * 6), 3, 64)
    assert [micro_batch.num_tokens for rank in ranks for micro_batch in rank] == [16, 16, 16]


def test_a_family_larger_than_a_micro_batch_is_cut() -> None:
    (rank,) = pack(completions(0, [20, 20, 20, 4 + 1]), 1, 41)
    assert sorted(micro_batch.num_tokens for micro_batch in rank) == [25, 40]


@given(
    families=st.lists(st.lists(st.integers(5, SEQ_LEN), min_size=1, max_size=8), max_size=12),
    num_ranks=st.integers(1, 5),
)
@example([[19, 19, 19, 27, 27]], 1)  # one micro-batch fewer together than apart
@settings(deadline=None)
def test_families_keep_to_the_budget_and_to_the_balance(families: list[list[int]], num_ranks: int) -> None:
    samples = [sample for prompt, lengths in enumerate(families) for sample in completions(prompt, lengths)]
    ranks = pack(samples, num_ranks, SEQ_LEN)
    bins = [micro_batch for rank in ranks for micro_batch in rank]
    assert Counter(sample for micro_batch in bins for sample in micro_batch.samples) == Counter(samples)
    assert all(micro_batch.num_tokens <= SEQ_LEN for micro_batch in bins)
    apart = [Sample((index, *sample.token_ids[1:]), sample.loss_mask) for index, sample in enumerate(samples)]
    assert len(bins) <= sum(map(len, pack(apart, num_ranks, SEQ_LEN)))  # no micro-batch more for keeping together


@given(
    families=st.lists(st.lists(st.integers(5, SEQ_LEN), min_size=1, max_size=8), max_size=12),
    num_ranks=st.integers(1, 4),
    pp=st.integers(2, 4),
)
@settings(deadline=None)
def test_a_pipeline_gets_the_same_samples_and_no_more_than_a_full_message_of_split_ones(families, num_ranks, pp):
    samples = [sample for prompt, lengths in enumerate(families) for sample in completions(prompt, lengths)]
    fewest, pipeline = len(pack(samples, num_ranks, SEQ_LEN)[0]), PipelineShape(pp)
    ranks = pack(samples, num_ranks, SEQ_LEN, Cost(per_micro_batch=0), pipeline)
    bins = [micro_batch for rank in ranks for micro_batch in rank]
    assert Counter(sample for micro_batch in bins for sample in micro_batch.samples) == Counter(samples)
    assert all(micro_batch.num_tokens <= SEQ_LEN for micro_batch in bins)
    assert len({len(rank) for rank in ranks}) == 1
    assert fewest <= len(ranks[0])
    if fewest >= pipeline.full_message:
        assert ranks == pack(samples, num_ranks, SEQ_LEN)


@pytest.mark.parametrize(
    ("prompt", "completion", "num_groups", "per_micro_batch", "expected", "why"),
    [
        (100, 100, 8, 0, [1] * 8, "as many as fill the stages, and each prompt with its completions"),
        (0, 100, 1, 0, [1] * 8, "nothing is shared: one by one"),
        (1000, 1, 1, 0, [1], "nearly everything is shared, and would be run once for each micro-batch"),
        (100, 100, 8, 1e4, [8], "launches cost more than waiting"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_few_samples_fill_a_pipeline_where_that_pays(prompt, completion, num_groups, per_micro_batch, expected, why):
    samples = [
        Sample((group,) * (prompt + 1) + (9,) * completion, (False,) * (prompt + 1) + (True,) * completion)
        for group in range(num_groups)
        for _ in range(8)
    ]
    (rank,) = pack(samples, 1, 16_384, Cost(per_micro_batch=per_micro_batch), PipelineShape(2))
    assert [len(prompts_in(micro_batch)) for micro_batch in rank] == expected


def test_parts_for_scorers_have_about_equally_many_tokens() -> None:
    lengths = [5, 100, 7, 90, 8, 1, 10, 3]
    parts = split_by_tokens(samples_of(lengths), 2)
    assert sorted(index for part in parts for index in part) == list(range(8))
    assert [sum(lengths[index] for index in part) for part in parts] == [112, 112]
    assert split_by_tokens(samples_of([4]), 3) == [[0], [], []]
