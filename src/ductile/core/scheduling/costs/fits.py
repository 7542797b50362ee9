"""Speeds from noisy measurements, some of which are far off: one stop of the machine is not how things are.

What took far longer than the others lead to expect is left out, as long as most of them stay.
"""

from collections.abc import Callable, Mapping, Sequence
from math import fsum
from typing import TypeVar

import numpy as np

from ductile.core.scheduling.costs.arithmetic import FloatArray, dot, least_squares, ordered_sum

FAR_OFF = 3.0
"""A measurement that took more than so many times what the others lead to expect is left out."""
SPEED_NOISE = 0.1
"""Share by which a machine's speed differs from one minute to another."""
OVERHEAD = 0.05
"""Share of a token's time that a further train slot adds for all slots, give or take, before anything is measured."""
EXPECTED_BYTES = 4e6
"""Bytes of an imagined migration at the expected speed, which counts as one measurement among the others."""

Row = TypeVar("Row", bound=tuple[float, ...])
"""A measurement: (amount, seconds, ...)."""
Parts = tuple[float, float]
"""The line through measurements: (seconds at the start, seconds for each one of the amount)."""


def trim_outliers(rows: Sequence[Row], fit: Callable[[Sequence[Row]], Parts]) -> list[Row]:
    """The rows without outliers, which are far above what `fit` finds in all of them."""
    kept = list(rows)
    while True:
        start_s, one_s = fit(kept)
        closer = [row for row in kept if row[1] <= FAR_OFF * (start_s + one_s * row[0])]
        if len(closer) == len(kept) or 2 * len(closer) < len(rows):
            return kept
        kept = closer


def line(rows: Sequence[tuple[float, ...]]) -> Parts:
    """`seconds = start + one amount` by least squares, neither of them negative."""
    amounts, seconds = _columns(rows)
    if np.ptp(amounts) > 0:
        start, one = least_squares([np.ones_like(amounts), amounts], seconds)
        if start > 0 and one > 0:
            return start, one
    return 0.0, float(dot(amounts, seconds) / dot(amounts, amounts))


def by_slots(per_token_s: Mapping[int, float]) -> Parts:
    """(seconds a token of one slot alone, overhead) from the seconds a token on each number of slots.

    However many micro-steps a number of slots has seen, it is one observation: what differs between two of them may be
    the machine's pace, which changes from minute to minute. So nearly equal numbers say little of the overhead, and far
    ones much: least squares with `SPEED_NOISE` as the noise and `OVERHEAD` as what is expected beforehand.
    """
    mean_s = fsum(per_token_s.values()) / len(per_token_s)
    rows = [((1.0, slots - 1.0), seconds / mean_s) for slots, seconds in per_token_s.items()]
    rows.append(((0.0, SPEED_NOISE / OVERHEAD), 0.0))
    columns, wanted = (np.array([row[part] for row in rows], float) for part in (0, 1))
    alone, other = least_squares([*columns.T], wanted)
    if other <= 0 or alone <= 0:
        return mean_s, 0.0
    return alone * mean_s, other / alone


def migration_cost(rows: Sequence[tuple[float, float]], expected: Parts) -> Parts:
    """(start, a byte of cache) of `seconds = start + byte bytes`, for rows (bytes, seconds).

    How many rollouts migrate matters little: messages do not grow much, and a generator takes them between two
    of its steps. Small caches tell next to nothing of a byte. So what is expected counts as two measurements more, and
    where the rows cannot tell one of the two at all, that one is what was expected.
    """
    start_s, byte_s = expected

    def fit(rows: Sequence[tuple[float, float]]) -> Parts:
        sizes, seconds = _columns([*rows, (0.0, start_s), (EXPECTED_BYTES, EXPECTED_BYTES * byte_s)])
        starts = np.ones_like(sizes)
        starts[-1] = 0.0  # the imagined migration has bytes and no messages
        start, expected_bytes = least_squares([starts, sizes / EXPECTED_BYTES], seconds)
        if start <= 0:
            return start_s, float(dot(sizes, np.maximum(0.0, seconds - start_s * starts)) / dot(sizes, sizes))
        if expected_bytes <= 0:
            return float(dot(starts, np.maximum(0.0, seconds - byte_s * sizes)) / ordered_sum(starts)), byte_s
        return start, expected_bytes / EXPECTED_BYTES

    return fit(trim_outliers(rows, fit))


def _columns(rows: Sequence[tuple[float, ...]]) -> tuple[FloatArray, FloatArray]:
    """The amounts and the seconds of all rows."""
    return np.array([row[0] for row in rows], np.float64), np.array([row[1] for row in rows], np.float64)
