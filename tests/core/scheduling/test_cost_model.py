import random

import pytest

from ductile.core.layout.geometry.parallel_layout import ONE_SLOT_RANK, RankShape
from ductile.core.scheduling.costs.cost import DecodeSpeed, TrainSpeed
from ductile.core.scheduling.costs.cost_model import PRIORS, WINDOW, CostModel


def test_before_anything_is_measured_there_are_priors_and_generation_is_not_known():
    measured = CostModel()
    assert not measured.knows_generation
    assert measured.speeds().prefill_tokens_per_s > 0
    assert measured.costs().resize_s == PRIORS["resize"]
    assert measured.costs().cache_bytes_per_s == 0, "the cache stays where it cannot travel"


def test_generation_is_known_from_its_first_decode_steps():
    measured = CostModel()
    measured.prefilled(1000, 0.5)
    assert not measured.knows_generation
    measured.decoded([(4.0, 400.0, 0.02)])
    assert measured.knows_generation
    assert measured.speeds().decode.seconds(4, 400) == pytest.approx(0.02)
    assert measured.speeds().prefill_tokens_per_s == pytest.approx(2000)
    assert measured.speeds().train.tokens_per_s == pytest.approx(2000 / 3), "until training is measured itself"


def test_speeds_are_found_again_from_noisy_measurements():
    draw, decode, train = random.Random(0), DecodeSpeed(0.01, 0.002), TrainSpeed(800, 0.05, 0.02)
    measured = CostModel()
    for _ in range(WINDOW):
        sequences, tokens, slots = draw.randint(1, 32), draw.randint(100, 2000), draw.choice([1, 8, 16])
        measured.decoded([(sequences, sequences * 50, decode.seconds(sequences) * draw.uniform(0.95, 1.05))])
        measured.micro_step(tokens, slots, train.seconds(tokens, slots) * draw.uniform(0.97, 1.03))
    found = measured.speeds()
    assert found.decode.seconds(16, 800) == pytest.approx(decode.seconds(16), rel=0.05)
    assert found.train.tokens_per_s == pytest.approx(800, rel=0.05)
    assert found.train.overhead == pytest.approx(0.05, abs=0.02)
    assert found.train.seconds(1000, 2) == pytest.approx(train.seconds(1000, 2), rel=0.05)


def test_what_one_number_of_slots_cannot_tell_is_not_made_up():
    measured = CostModel()
    for tokens in (100, 500, 900):
        measured.micro_step(tokens, 3, 0.1 + tokens / 1000)
    assert measured.speeds().train == TrainSpeed(pytest.approx(1000), 0.0, pytest.approx(0.1))


@pytest.mark.parametrize("seconds", [[0.5], [0.5, 0.5]])
def test_micro_steps_of_one_size_say_how_fast_and_no_more(seconds):
    measured = CostModel()
    for each in seconds:
        measured.micro_step(500, 2, each)
    assert measured.speeds().train == TrainSpeed(pytest.approx(1000), 0.0, 0.0)


def test_a_stop_of_the_machine_does_not_bend_the_line_of_micro_steps():
    measured = CostModel()
    for tokens in range(100, 1100, 50):
        measured.micro_step(tokens, 3, 0.1 + tokens / 1000)
    measured.micro_step(700, 4, 6.0)
    measured.micro_step(700, 4, 0.1 + 0.7 * 1.05)
    assert measured.speeds().train.seconds(1000, 3) == pytest.approx(1.1, rel=0.05)


def test_nearly_equal_numbers_of_slots_say_little_of_what_a_further_one_costs():
    """The machine was slow for a minute; one slot alone must not look like two, nor six like three."""
    measured = CostModel()
    for seconds in (0.41, 0.42, 0.43) * 10:
        measured.micro_step(1000, 3, seconds)
    for seconds in (0.79, 0.8):
        measured.micro_step(1000, 5, seconds)
    train = measured.speeds().train
    assert 0 < train.overhead < 0.2
    assert train.of(1) < train.of(3) < train.of(6)


def test_a_short_micro_step_on_another_number_of_slots_does_not_bend_the_speed():
    measured = CostModel()
    for tokens in range(20, 1000, 16):
        measured.micro_step(tokens, 3, 0.1 + tokens / 1000)
    for seconds in (0.09, 0.08):
        measured.micro_step(20, 5, seconds)
        assert measured.speeds().train.seconds(1000, 3) == pytest.approx(1.1, rel=0.15)


def test_full_micro_steps_of_nearly_one_size_say_how_fast():
    draw, measured = random.Random(0), CostModel()
    for _ in range(3 * WINDOW):
        measured.micro_step(draw.randint(995, 1005), 3, draw.uniform(0.95, 1.05))
        assert measured.speeds().train.seconds(1000, 3) == pytest.approx(1.0, rel=0.06)


def test_without_others_first_micro_steps_say_how_fast():
    measured = CostModel()
    measured.first_micro_step(500, 2, 0.5)
    assert measured.speeds().train == TrainSpeed(pytest.approx(1000), 0.0, 0.0)


def test_the_first_micro_step_after_a_resize_is_a_cost_of_it_and_no_speed():
    measured = CostModel()
    measured.first_micro_step(500, 2, 3.0)
    for _ in range(3):
        measured.took("resize", 0.2)
    assert measured.costs().resize_s == pytest.approx(0.2), "before others there is nothing to compare it with"
    for tokens in (400, 500, 600):
        measured.micro_step(tokens, 2, tokens / 1000)
    measured.first_micro_step(500, 3, 0.9)
    assert measured.costs().resize_s == pytest.approx(0.6)
    assert measured.speeds().train == TrainSpeed(pytest.approx(1000), 0.0, pytest.approx(0.0, abs=1e-9))


def test_what_changes_cost_is_guessed_from_how_long_weights_take():
    measured = CostModel()
    measured.took("publish", 0.05)
    measured.took("receive", 0.01)
    costs = measured.costs()
    assert (costs.resize_s, costs.prepare_s, costs.assign_s) == pytest.approx((0.2, 0.2, 0.06))


def test_one_change_alone_does_not_say_what_the_next_ones_cost():
    measured = CostModel()
    measured.took("publish", 0.05)
    measured.took("receive", 0.01)
    measured.took("assign", 0.4)
    assert measured.costs().assign_s == pytest.approx(0.23), "it was the first, and what was expected counts as well"
    measured.took("assign", 0.1)
    measured.took("assign", 0.1)
    assert measured.costs().assign_s == pytest.approx(0.1)


def test_an_empty_micro_step_says_nothing_of_speed():
    measured = CostModel()
    measured.micro_step(0, 2, 0.01)
    assert measured.speeds().train.tokens_per_s > 0


def test_the_latest_count_and_one_hiccup_does_not():
    measured = CostModel()
    for seconds in [60.0] * 3 + [0.2] * WINDOW:
        measured.took("resize", seconds)
    measured.took("resize", 30.0)
    assert measured.costs().resize_s == 0.2


def test_a_tail_of_single_sequences_does_not_make_full_batches_forgotten():
    measured = CostModel()
    measured.decoded([(32.0, 3200.0, 0.074)] * 3)
    measured.decoded([(1.0, 100.0, 0.012)] * 1000)
    assert measured.speeds().decode.seconds(32, 3200) == pytest.approx(0.074, rel=0.05)


def test_a_cache_travels_at_the_speed_at_which_it_was_seen_to():
    measured = CostModel(cache_bytes_per_token=2000)
    assert measured.costs().cache_bytes_per_s > 0, "or it would never be tried"
    for tokens in (1000, 30_000, 15_000, 40_000) * 8:
        measured.migrated(tokens, 0.03 + 2000 * tokens / 4e8)
    costs = measured.costs()
    assert costs.cache_bytes_per_token == pytest.approx(2000)
    assert costs.cache_bytes_per_s == pytest.approx(4e8, rel=0.05)
    assert costs.migration_s == pytest.approx(0.03, rel=0.1)


def test_messages_of_small_caches_do_not_make_caches_slow():
    """Or rollouts would be prefilled again ever after, and the cache's real speed never be seen."""
    measured = CostModel(cache_bytes_per_token=2000)
    for tokens in (50, 200, 300, 200, 50):
        measured.migrated(tokens, 0.15)
    assert measured.costs().cache_bytes_per_s > 1e8
    assert measured.costs().migration_s == pytest.approx(0.13, abs=0.02)


def test_a_slow_cache_is_found_out():
    measured = CostModel(cache_bytes_per_token=2000)
    for tokens in (2000, 4000):
        measured.migrated(tokens, 0.05 + 2000 * tokens / 2e6)
    assert measured.costs().cache_bytes_per_s < 1e7


def test_a_migration_that_waited_for_a_micro_step_is_left_out():
    measured = CostModel(cache_bytes_per_token=2000)
    for seconds in [0.05] * 4 + [2.5] + [0.05] * 4:
        measured.migrated(0, seconds)
    assert measured.costs().migration_s == pytest.approx(0.05)
    assert measured.costs().cache_bytes_per_s == pytest.approx(1e9, rel=0.01), "no cache went along"


def test_where_caches_cannot_travel_messages_alone_are_measured():
    measured = CostModel()
    for _ in range(3):
        measured.migrated(3000, 0.2)
    assert 0.1 < measured.costs().migration_s < 0.2, "what was expected counts once"
    assert measured.costs().cache_bytes_per_s == 0


TP2, PP2 = RankShape(tp=2), RankShape(pp=2)


def test_what_is_not_measured_of_a_rank_of_several_slots_is_assumed():
    train = TrainSpeed(1000)
    assert [train.rank_speed(shape) for shape in (ONE_SLOT_RANK, TP2, PP2)] == pytest.approx([1.0, 2 / 1.05, 2 * 8 / 9])
    assert train.rank_speed(RankShape(pp=2, cp=2, tp=4)) == pytest.approx(16 * 8 / 9 / (1.05 * 1.15))
    assert train.seconds(1000, 1, TP2) == pytest.approx(1.05 / 2)


def test_ranks_of_several_slots_tell_their_speed_beside_those_of_one():
    measured = CostModel()
    truth = TrainSpeed(800, 0.05, 0.02, rank_speeds=((TP2, 1.2),))
    for tokens in range(100, 900, 50):
        for ranks, shape in ((4, ONE_SLOT_RANK), (2, TP2), (2, ONE_SLOT_RANK)):
            measured.micro_step(tokens, ranks, truth.seconds(tokens, ranks, shape), shape)
    train = measured.speeds().train
    for ranks, shape in ((4, ONE_SLOT_RANK), (2, ONE_SLOT_RANK), (2, TP2)):
        assert train.seconds(500, ranks, shape) == pytest.approx(truth.seconds(500, ranks, shape), rel=0.05)
    assert [shape for shape, _ in train.rank_speeds] == [TP2]
    assert train.rank_speed(PP2) == pytest.approx(2 * 8 / 9), "the bubble of eight micro-batches"


def test_where_only_ranks_of_several_slots_were_seen_what_they_take_is_predicted_all_the_same():
    measured = CostModel()
    for tokens in range(100, 900, 50):
        measured.micro_step(tokens, 3, 0.1 + tokens / 1500, TP2)
    train = measured.speeds().train
    assert train.rank_speeds == ()
    assert train.seconds(600, 3, TP2) == pytest.approx(0.5)
    assert train.tokens_per_s == pytest.approx(1500 * 1.05 / 2), "one slot's, by what is assumed of tp 2"


def test_a_first_micro_step_is_held_against_those_of_its_own_shape():
    measured = CostModel()
    for tokens in range(100, 900, 50):
        measured.micro_step(tokens, 2, tokens / 1000, ONE_SLOT_RANK)
        measured.micro_step(tokens, 2, tokens / 1500, TP2)
    before = measured.costs().resize_s
    measured.first_micro_step(750, 2, 0.9, TP2)
    assert measured.costs().resize_s - before == pytest.approx(0.4, rel=0.01)
