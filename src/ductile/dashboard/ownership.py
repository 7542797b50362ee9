"""Who did what when, as shapes: one row a slot, one path a slot and activity.

A path instead of a rectangle a span keeps a long run's page small; the chart is drawn in seconds, and the page scales
and moves it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ductile.core.scheduling.facts.ledger import Span
from ductile.dashboard.causes import said
from ductile.dashboard.colours import COLOURS

MOST_ROWS = 64
"""Slots that are drawn at most; of more, evenly chosen ones."""


@dataclass(frozen=True, slots=True)
class SvgShape:
    colour: str
    title: str
    path: str


@dataclass(frozen=True, slots=True)
class Ownership:
    slots: tuple[int, ...]
    """Slots that are drawn, top to bottom."""
    num_slots: int
    """Number of slots, drawn or not."""
    end_s: float
    shapes: tuple[SvgShape, ...]


def ownership(spans: Iterable[Span]) -> Ownership:
    rows: dict[int, list[Span]] = {}
    for span in spans:
        rows.setdefault(span.slot, []).append(span)
    slots = chosen(sorted(rows))
    shapes = [shape for row, slot in enumerate(slots) for shape in _shapes(row, slot, rows[slot])]
    end_s = max((spans[-1].end_s for spans in rows.values()), default=0.0)
    return Ownership(tuple(slots), len(rows), end_s, tuple(shapes))


def chosen(slots: Sequence[int]) -> list[int]:
    """The slots that are drawn: `MOST_ROWS` at most, evenly chosen."""
    if len(slots) <= MOST_ROWS:
        return list(slots)
    return [slots[place * len(slots) // MOST_ROWS] for place in range(MOST_ROWS)]


def _shapes(row: int, slot: int, spans: Iterable[Span]) -> Iterable[SvgShape]:
    paths: dict[tuple[str, str], list[str]] = {}
    for span in spans:
        what = said(span.activity, span.cause)
        bar = f"M{span.start_s:.3f} {row + 0.1:g}h{span.seconds:.3f}v.8h-{span.seconds:.3f}z"
        paths.setdefault((COLOURS[span.activity], what), []).append(bar)
    for (colour, what), bars in paths.items():
        yield SvgShape(colour, f"slot {slot}: {what}", "".join(bars))
