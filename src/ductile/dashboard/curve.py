"""A number of each step as a line in a small chart with axes: where its points, ticks and numbers are."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Field(NamedTuple):
    """A chart, and in it the field of the points: left of that are the values, below it the steps."""

    width: float = 360.0
    height: float = 150.0
    left: float = 52.0
    right: float = 348.0
    top: float = 10.0
    bottom: float = 126.0


FIELD = Field()
CURVES = (
    ("reward", "reward_mean", "{:.3f}"),
    ("held-out reward", "eval_reward", "{:.3f}"),
    ("completion length, tokens", "length_mean", "{:.1f}"),
    ("seconds a step", "step_s", "{:.2f}"),
    ("tokens/s generated", "tokens_per_s_generate", "{:,.0f}"),
    ("tokens/s trained", "tokens_per_s_train", "{:,.0f}"),
    ("loss", "loss", "{:.4f}"),
    ("versions off-policy", "off_policy_mean", "{:.2f}"),
)


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    """Distance from the chart's left or top, in its units."""
    text: str


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    form: str
    points: tuple[tuple[float, float], ...]
    """Points as (step, value), at least one."""

    @property
    def last(self) -> str:
        return self.form.format(self.points[-1][1])

    @property
    def values(self) -> list[Tick]:
        """Round numbers, of which the lowest and the highest enclose all points."""
        low, high, between = self._scale()
        decimals = max(0, -math.floor(math.log10(between) + 1e-9))
        numbers = [between * number for number in range(round(low / between), round(high / between) + 1)]
        return [Tick(self._down(number), f"{number:,.{decimals}f}") for number in numbers]

    @property
    def steps(self) -> list[Tick]:
        """Round numbers among the steps."""
        first, last = self.points[0][0], self.points[-1][0]
        between = max(1, round_up((last - first) / 5))
        start = math.ceil(first / between) * between
        marked = range(int(start), int(last) + 1, int(between)) if last > first else [int(first)]
        return [Tick(self._across(step), str(step)) for step in marked]

    @property
    def dots(self) -> list[tuple[float, float]]:
        return [(self._across(step), self._down(value)) for step, value in self.points]

    @property
    def line(self) -> str:
        """The points of an SVG polyline."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.dots)

    def _scale(self) -> tuple[float, float, float]:
        """Lowest and highest value of the field, and what lies between two ticks. A value that never changes is a line
        in the middle."""
        low, high = min(value for _, value in self.points), max(value for _, value in self.points)
        if high - low <= 1e-9 * abs(low):
            between = round_up(abs(low) / 4 or 0.5)
            return low - between, low + between, between
        between = round_up((high - low) / 4)
        return math.floor(low / between) * between, math.ceil(high / between) * between, between

    def _across(self, step: float) -> float:
        first, last = self.points[0][0], self.points[-1][0]
        return FIELD.left + (FIELD.right - FIELD.left) * ((step - first) / (last - first) if last > first else 0.5)

    def _down(self, value: float) -> float:
        low, high, _ = self._scale()
        return FIELD.bottom - (FIELD.bottom - FIELD.top) * (value - low) / (high - low)


def round_up(number: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50, ... and of their decimal parts."""
    power = 10.0 ** math.floor(math.log10(number)) if number > 0 else 1.0
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= number * (1 - 1e-9))


def curves(rows: Iterable[Mapping[str, Any]]) -> list[Curve]:
    """The curves that the rows have numbers for."""
    rows = list(rows)
    found: list[Curve] = []
    for name, key, form in CURVES:
        points = tuple((float(row["step"]), float(row[key])) for row in rows if _is_number(row.get(key)))
        if points:
            found.append(Curve(name, form, points))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
