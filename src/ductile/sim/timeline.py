"""A run as a chart of which slot did what when: text for a terminal, SVG for a page.

Letters in the text say what a slot did for most of a column's time:

    T train   G generate   S score   P publish   / switch   . idle
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from ductile.core.scheduling.facts.ledger import Activity, IdleCause, Span
from ductile.dashboard.causes import named, said
from ductile.dashboard.colours import COLOURS
from ductile.dashboard.ownership import chosen

LETTERS: dict[Activity, str] = {
    "train": "T", "generate": "G", "score": "S", "publish": "P", "switch": "/", "idle": "."
}  # fmt: skip


def gantt(spans: Sequence[Span], *, width: int = 100, start_s: float = 0.0) -> str:
    """One line a slot and one column an equal share of the time."""
    end_s = max((span.end_s for span in spans), default=0.0)
    column_s = (end_s - start_s) / width
    rows = _by_slot(spans)
    if column_s <= 0 or not rows:
        return "nothing happened"
    digits = len(str(max(rows)))
    lines = [f"{slot:>{digits}} {_line(rows[slot], start_s, column_s, width)}" for slot in chosen(sorted(rows))]
    scale = f"{start_s:.0f} s".ljust(width - len(f"{end_s:.0f} s")) + f"{end_s:.0f} s"
    legend = "   ".join(f"{letter} {activity}" for activity, letter in LETTERS.items())
    return "\n".join([*lines, " " * (digits + 1) + scale, legend])


def causes(idle: Mapping[IdleCause, float], slot_seconds: float) -> str:
    """ "tail 12.1%, queue full 3.0%": shares of all slot-seconds, the largest first, none that would be 0.0%."""
    shares = sorted(((spent_s / slot_seconds, cause) for cause, spent_s in idle.items()), reverse=True)
    return ", ".join(f"{named(cause)} {share:.1%}" for share, cause in shares if share >= 0.0005) or "none"


def svg(spans: Sequence[Span], title: str, *, width: int = 1200) -> str:
    """The same as one self-contained image; a tooltip says what a stretch is."""
    rows = _by_slot(spans)
    slots = chosen(sorted(rows))
    end_s = max((span.end_s for span in spans), default=1.0)
    left, right, top, height, gap = 64, 32, 40, 14, 3
    per_s = (width - left - right) / max(end_s, 1e-9)
    digits = 0 if end_s >= 20 else 2  # ten ticks of a few seconds differ in their fractions
    bars = [
        f'<rect x="{left + span.start_s * per_s:.2f}" y="{top + place * (height + gap)}" '
        f'width="{max(0.2, span.seconds * per_s):.2f}" height="{height}" fill="{COLOURS[span.activity]}">'
        f"<title>slot {slot}: {said(span.activity, span.cause)}, "
        f"{span.start_s:.1f}-{span.end_s:.1f} s</title></rect>"
        for place, slot in enumerate(slots)
        for span in rows[slot]
        if span.seconds * per_s >= 0.2
    ]
    names = [
        f'<text x="{left - 6}" y="{top + place * (height + gap) + height - 3}" text-anchor="end">slot {slot}</text>'
        for place, slot in enumerate(slots)
    ]
    bottom = top + len(slots) * (height + gap)
    ticks = [
        f'<text x="{left + end_s * part / 10 * per_s:.1f}" y="{bottom + 14}" text-anchor="middle">'
        f"{end_s * part / 10:.{digits}f} s</text>"
        for part in range(0, 11)
    ]
    legend = [
        f'<rect x="{left + place * 110}" y="22" width="10" height="10" fill="{colour}"/>'
        f'<text x="{left + place * 110 + 14}" y="31">{activity}</text>'
        for place, (activity, colour) in enumerate(COLOURS.items())
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 24}" '
            'font-family="sans-serif" font-size="11">',
            f'<rect width="100%" height="100%" fill="white"/><text x="{left}" y="14">{escape(title)}</text>',
            *legend,
            *names,
            *bars,
            *ticks,
            "</svg>",
            "",
        ]
    )


def _by_slot(spans: Iterable[Span]) -> dict[int, list[Span]]:
    rows: dict[int, list[Span]] = {}
    for span in spans:
        rows.setdefault(span.slot, []).append(span)
    return rows


def _line(spans: Sequence[Span], start_s: float, column_s: float, width: int) -> str:
    spent: list[dict[str, float]] = [{} for _ in range(width)]
    for span in spans:
        first = int(max(0.0, span.start_s - start_s) / column_s)
        for column in range(first, min(width, int((span.end_s - start_s) / column_s) + 1)):
            begins_s, ends_s = start_s + column * column_s, start_s + (column + 1) * column_s
            overlap_s = min(span.end_s, ends_s) - max(span.start_s, begins_s)
            if overlap_s > 0:
                letter = LETTERS[span.activity]
                spent[column][letter] = spent[column].get(letter, 0.0) + overlap_s
    return "".join(max(column, key=lambda letter: column[letter]) if column else " " for column in spent)
