"""A number of each step as a line: where its points are in a small picture."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 320.0, 90.0
CURVES = (
    ("reward", "reward_mean", "{:.3f}"),
    ("held-out reward", "eval_reward", "{:.3f}"),
    ("answer length, tokens", "length_mean", "{:.1f}"),
    ("seconds a step", "step_s", "{:.2f}"),
    ("tokens/s generated", "tokens_per_s_generate", "{:,.0f}"),
    ("tokens/s trained", "tokens_per_s_train", "{:,.0f}"),
    ("loss", "loss", "{:.4f}"),
    ("versions off-policy", "off_policy_mean", "{:.2f}"),
)


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    form: str
    points: tuple[tuple[float, float], ...]
    """(step, value), at least one."""

    @property
    def low(self) -> str:
        return self.form.format(min(value for _, value in self.points))

    @property
    def high(self) -> str:
        return self.form.format(max(value for _, value in self.points))

    @property
    def last(self) -> str:
        return self.form.format(self.points[-1][1])

    @property
    def first_step(self) -> int:
        return int(self.points[0][0])

    @property
    def last_step(self) -> int:
        return int(self.points[-1][0])

    @property
    def line(self) -> str:
        """The points of an SVG polyline. A value that never changes is a line in the middle."""
        steps, values = [step for step, _ in self.points], [value for _, value in self.points]
        across = (max(steps) - min(steps)) or 1.0
        low, span = min(values), max(values) - min(values)
        return " ".join(
            f"{WIDTH * (step - steps[0]) / across:.1f},"
            f"{HEIGHT - 4 - (HEIGHT - 8) * ((value - low) / span if span else 0.5):.1f}"
            for step, value in self.points
        )


def curves(rows: Iterable[Mapping[str, Any]]) -> list[Curve]:
    """Those that the rows have numbers for."""
    rows = list(rows)
    found: list[Curve] = []
    for name, key, form in CURVES:
        points = tuple((float(row["step"]), float(row[key])) for row in rows if row.get(key) is not None)
        if points:
            found.append(Curve(name, form, points))
    return found
