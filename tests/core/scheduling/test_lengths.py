import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.core.scheduling.facts.length_estimates import survival

LENGTHS = st.lists(st.integers(0, 1000), max_size=60)


@settings(deadline=None)
@given(LENGTHS, LENGTHS, LENGTHS)
def test_chances_fall_from_one_to_zero_and_the_rest_fits_the_limit(ended, cut, unfinished):
    lengths = survival(1000, ended, cut, unfinished)
    assert lengths.alive[0] == 1
    assert lengths.alive[-1] == 0
    assert np.all(np.diff(lengths.alive) <= 1e-12)
    assert np.all(lengths.rest >= 0)
    assert np.all(lengths.rest <= 1000 - lengths.edges + 1e-6)


def test_with_everything_seen_it_is_what_was_seen():
    draw = np.random.default_rng(1)
    seen = np.minimum(draw.lognormal(5, 1, 5000).astype(int), 1999)
    lengths = survival(2000, [int(length) for length in seen])
    assert lengths.mean() == pytest.approx(seen.mean(), rel=0.03)
    for sofar in (50, 200, 800):
        rest = (seen[seen > sofar] - sofar).mean()
        assert lengths.remaining([sofar])[0] == pytest.approx(rest, rel=0.1)


def test_unfinished_ones_count():
    """A tenth has finished, all short: the others are longer than that, and nobody would guess 20."""
    naive = survival(1000, [20] * 10)
    fair = survival(1000, [20] * 10, unfinished=[25] * 90)
    assert naive.mean() < 80
    assert fair.mean() > 150


def test_before_anything_is_seen_the_rest_grows_with_what_was_outlived():
    rest = survival(8000).remaining([0, 1000, 2000])
    assert rest[0] < rest[1] < rest[2]
    assert 1000 < rest[0] < 4000


def test_half_way_through_a_step_the_prediction_is_near_the_truth():
    """What decides when to move slots: expected tokens of those that are left, from those that ended so far."""
    draw = np.random.default_rng(7)
    truth = np.minimum(draw.lognormal(5.5, 1.0, 2000).astype(int), 4000)
    for sofar in (200, 400, 800):
        ended = [int(length) for length in truth if length <= sofar]
        alive = truth[truth > sofar]
        lengths = survival(4000, ended, unfinished=[sofar] * len(alive))
        history = survival(4000, [*(int(length) for length in truth), *ended], unfinished=[sofar] * len(alive))
        assert history.remaining([sofar])[0] == pytest.approx((alive - sofar).mean(), rel=0.2)
        assert lengths.remaining([sofar])[0] > 0.4 * (alive - sofar).mean()
