"""Numbers that users' functions return: rewards, metrics, advantages, whichever library made them."""

import math
from typing import Protocol, SupportsFloat, runtime_checkable


@runtime_checkable
class _Scalar(Protocol):
    """A number of numpy, torch or JAX, or an array of them."""

    def item(self) -> object:
        """Return the only number. Raises where there are several."""
        ...


def as_number(value: object) -> float | None:
    """The number that `value` is, which may be infinite or NaN; None where it is none.

    Numbers are Python's, Decimal and Fraction, and what numpy, torch and JAX make, also an array that holds one only;
    true is 1. A text and a complex number are none.
    """
    try:
        number = value.item() if isinstance(value, _Scalar) else value
        if not isinstance(number, SupportsFloat) or isinstance(number, complex):
            return None
        try:
            return float(number)
        except OverflowError:  # beyond all floats
            return -math.inf if number < 0 else math.inf  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]
    except Exception:  # users' code: several numbers, an expression with unknowns, a mistake
        return None


def as_finite(value: object) -> float | None:
    """The finite number that `value` is; None where it is none."""
    number = as_number(value)
    return number if number is not None and math.isfinite(number) else None
