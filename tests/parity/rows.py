"""One table: a row for each thing that was to be shown, which says PASS or FAIL and what was found."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Verdict = Literal["PASS", "FAIL"]


@dataclass(frozen=True)
class Row:
    name: str
    model: str
    verdict: Verdict
    values: Mapping[str, float]
    """What was found, by column; empty where nothing could be."""
    note: str = ""
    seconds: float = 0.0
    traceback: str = ""
    """Of what kept the values from being found."""

    def line(self, name_width: int) -> str:
        values = "".join(
            f"{value:>10}" if isinstance(value, int) else f"{value:>10.1e}" for value in self.values.values()
        )
        seconds = f"{self.seconds:>6.1f}" if self.seconds else ""
        return f"{self.verdict}  {self.model:6} {self.name:{name_width}}{values}{seconds}  {self.note}".rstrip()


def judged(name: str, model: str, values: Mapping[str, float], bounds: Mapping[str, float], seconds: float) -> Row:
    """The row of what was found: PASS when no value is above its bound. NaN is above every bound; a value without a
    bound is only told."""
    above = [f"{key} is above {bound:g}" for key, bound in bounds.items() if not values[key] <= bound]
    return Row(name, model, "FAIL" if above else "PASS", values, "; ".join(above), seconds)


def header(columns: Iterable[str], name_width: int) -> str:
    """Names of the columns, over `Row.line` of the same width."""
    return " " * (13 + name_width) + "".join(f"{column:>10}" for column in columns) + f"{'s':>6}"


def summary(rows: Iterable[Row]) -> str:
    """ "88 rows: 88 PASS, 0 FAIL"."""
    counts = Counter(row.verdict for row in rows)
    each = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict))
    return f"{counts.total()} rows: {each}"
