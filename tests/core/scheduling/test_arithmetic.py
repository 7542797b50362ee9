import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ductile.core.scheduling.costs.arithmetic import (
    chance_of_any,
    dot,
    interpolate,
    least_squares,
    mixed_power,
    ordered_sum,
    whole_times,
)

NUMBERS = st.floats(-1e6, 1e6)


@given(arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(0, 60)), elements=NUMBERS))
def test_a_sum_goes_from_the_first_to_the_last(values):
    expected = []
    for row in values.tolist():
        total = 0.0
        for value in row:
            total += value
        expected.append(total)
    assert ordered_sum(values).tolist() == expected
    assert dot(values, np.ones(values.shape[1])).tolist() == expected


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=20))
def test_the_chance_of_any_is_that_of_a_poisson_variable(expected):
    found = chance_of_any(np.array(expected))
    assert found == pytest.approx(-np.expm1(-np.array(expected)), rel=1e-12, abs=1e-300)
    assert np.all((found >= 0) & (found <= 1))


@given(st.floats(0, 1), st.integers(0, 200))
def test_a_whole_power_is_the_power(base, exponent):
    assert mixed_power(np.array([base]), exponent)[0] == pytest.approx(base**exponent, rel=1e-11, abs=1e-300)


@given(st.floats(0, 1), st.integers(0, 20), st.floats(0, 1))
def test_between_two_powers_it_is_their_mixture(base, whole, share):
    expected = (1 - share) * base**whole + share * base ** (whole + 1)
    assert mixed_power(np.array([base]), whole + share)[0] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(
    st.lists(NUMBERS, min_size=2, max_size=30, unique=True).map(sorted),
    st.lists(st.floats(-2e6, 2e6), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
def test_between_edges_it_is_linear(edges, at, draw):
    edges = np.array(edges)
    edges = edges[np.append(True, np.diff(edges) > 1e-3)]
    if len(edges) < 2:
        return
    values = np.array([draw.uniform(-1, 1) for _ in edges])
    assert interpolate(np.array(at), edges, values) == pytest.approx(np.interp(at, edges, values), abs=1e-6)


def test_least_squares_are_those_of_lapack():
    draw = np.random.default_rng(0)
    for count in (1, 2, 3):
        columns = draw.random((50, count)) * [1, 300, 1e5][:count]
        wanted = columns @ draw.random(count) + draw.normal(size=50)
        found = least_squares([*columns.T], wanted)
        assert found == pytest.approx(np.linalg.lstsq(columns, wanted, rcond=None)[0].tolist(), rel=1e-8)


def test_what_earlier_columns_explain_gets_nothing():
    ones, amounts = np.ones(5), np.arange(5.0)
    assert least_squares([ones, amounts, 3 * amounts + 2], 1 + 2 * amounts) == pytest.approx([1, 2, 0])
    assert least_squares([np.zeros(3), np.ones(3)], np.full(3, 4.0)) == pytest.approx([0, 4])


def test_what_fits_in_but_for_rounding_counts():
    assert whole_times(0.01, 0.002) == whole_times(0.01 * (1 - 1e-12), 0.002) == 5
    assert whole_times(0.01 * (1 - 1e-6), 0.002) == 4
