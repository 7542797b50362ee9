"""How figures are put into words and tables, the same on every page."""

import textwrap
from collections.abc import Iterable, Sequence


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def prose(*sentences: str) -> str:
    return textwrap.fill(" ".join(sentences), 120, break_long_words=False, break_on_hyphens=False)


def listed(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def change(share: float) -> str:
    """ "+4 %", "-13 %", "0 %"."""
    return changes([share])


def changes(shares: Iterable[float]) -> str:
    """ "-12 to +3 %", from the least to the most."""
    found = sorted(round(100 * share) for share in shares)
    low, high = (f"{share:+d}" if share else "0" for share in (found[0], found[-1]))
    return f"{low} %" if low == high else f"{low} to {high} %"


def less(share: float) -> str:
    """ "13 % less", of -0.13; a digit more where it would be 0 %."""
    size = percent(abs(share)) if abs(share) >= 0.005 else f"{100 * abs(share):.1f} %"
    return f"{size} {'more' if share > 0 else 'less'}"


def span(values: Iterable[float], form: str, unit: str = "") -> str:
    """ "0.3 to 1.1 s", from the least to the most."""
    found = sorted(values)
    low, high = format(found[0], form), format(found[-1], form)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def two_digits(number: float) -> str:
    """ "0.041", "3.8", "126"."""
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"
