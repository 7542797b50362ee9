"""Text of others, such as a completion, as a terminal may see it: what would steer the terminal is spelled out."""

import unicodedata

STEERING = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Unicode categories: C0 and C1 controls, halves of characters, line and paragraph separators."""
DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that turn the reading direction, also of what is printed after them."""


def printable(text: str, keep: str = "") -> str:
    """One line: `\\n`, `\\x1b` and their like as they are written in Python. `keep` names controls that may stay.

    Example: `printable("\\x1b]52;c;cm0=\\a")` is `\\x1b]52;c;cm0=\\x07`, spelled with backslashes.
    """
    return "".join(_spelled(char) if _steers(char) and char not in keep else char for char in text)


def _steers(char: str) -> bool:
    return unicodedata.category(char) in STEERING or char in DIRECTIONS or _is_tag(char)


def _is_tag(char: str) -> bool:
    """Letters that are not seen, and that a copied line carries along."""
    return "\U000e0000" <= char <= "\U000e007f"


def _spelled(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")
