"""Arithmetic whose last bit is the same on every machine.

A decision is replayed and simulated elsewhere than where it was made, so the numbers behind it must not depend on the
processor. IEEE 754 rounds `+ - * /` and the square root in one way only, and numpy applies them element by element.
What differs from machine to machine is left out: `exp` and `pow` (numpy and libm choose an implementation by the
processor), BLAS and LAPACK, sums whose order the library chooses, `sum` of floats (compensated since Python 3.12), and
library loops that a compiler may turn into fused multiply-adds.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

EQUAL = 1e-9
"""Numbers that differ by less than this share count as equal: a rule decides between them, not the last bit."""
_HALVINGS = 8
_SURELY = 40.0
"""Mean of a Poisson variable from which on an event is sure: the chance of none is below half a unit in the last place
of 1."""


def whole_times(amount: float, part: float) -> int:
    """How many times `part` fits into `amount`; a last one that rounding alone keeps out counts."""
    return int(amount / part * (1 + EQUAL))


def ordered_sum(values: FloatArray) -> FloatArray:
    """[..., n] -> [...]: the sum along the last axis, from the first value to the last."""
    # `cumsum` is sequential by what it returns; `sum` is not.
    return np.cumsum(values, axis=-1)[..., -1] if values.shape[-1] else np.zeros(values.shape[:-1])


def dot(left: FloatArray, right: FloatArray) -> FloatArray:
    """[..., n], [n] -> [...]: the ordered sum of the products."""
    return ordered_sum(left * right)


def chance_of_any(expected: FloatArray) -> FloatArray:
    """`1 - exp(-expected)`, element by element: the chance of at least one event where so many are expected.

    A Taylor series for 1/256 of it, then `1 - (1 - p)^2 = p (2 - p)` eight times, in which nothing cancels. The
    relative error is below 1e-13. expected: not negative.
    """
    small = np.minimum(expected, _SURELY) / 2.0**_HALVINGS
    chance = small * 0.0
    for order in range(10, 0, -1):
        chance = (small / order) * (1.0 - chance)
    for _ in range(_HALVINGS):
        chance = chance * (2.0 - chance)
    return chance


def mixed_power(base: FloatArray, exponent: float) -> FloatArray:
    """`base` to a power between two whole ones: the mixture of both whose mean exponent is `exponent`.

    Groups that have 3.25 members on average are three quarters with 3 members and a quarter with 4. exponent: at least
    0.
    """
    whole = int(exponent)
    power, square, bits = np.ones_like(base), base, whole
    while bits:
        if bits & 1:
            power = power * square
        square, bits = square * square, bits >> 1
    share = exponent - whole
    return power * ((1.0 - share) + share * base)


def interpolate(at: FloatArray, edges: FloatArray, values: FloatArray) -> FloatArray:
    """What `np.interp` does: linear between the ascending `edges`, and the outermost values beyond them."""
    at = np.clip(at, edges[0], edges[-1])
    cell = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, len(edges) - 2)
    share = (at - edges[cell]) / (edges[cell + 1] - edges[cell])
    return values[cell] * (1.0 - share) + values[cell + 1] * share


def least_squares(columns: Sequence[FloatArray], wanted: FloatArray) -> list[float]:
    """The coefficients with which the `columns` come nearest to `wanted`, by modified Gram-Schmidt.

    A column that the ones before it explain to nine digits gets 0: the measurements cannot tell them apart.
    """
    basis: list[FloatArray] = []
    upper: list[list[float]] = []
    along: list[float] = []
    for column in columns:
        rest, parts = column, list[float]()
        for unit in basis:
            part = float(dot(rest, unit))
            parts.append(part)
            rest = rest - part * unit
        norm = float(np.sqrt(dot(rest, rest)))
        independent = norm > 1e-9 * float(np.sqrt(dot(column, column)))
        unit = rest / norm if independent else np.zeros_like(rest)
        along.append(float(dot(wanted, unit)))
        wanted = wanted - along[-1] * unit
        basis.append(unit)
        upper.append([*parts, norm if independent else 0.0])
    found = [0.0] * len(basis)
    for row in reversed(range(len(basis))):
        if upper[row][row]:
            rest_of_it = along[row]
            for later in range(row + 1, len(basis)):
                rest_of_it -= upper[later][row] * found[later]
            found[row] = rest_of_it / upper[row][row]
    return found
