"""Numbers of users' functions: what is none of them is told, whatever it does when it is asked."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from ductile.user_numbers import as_finite, as_number


class Faulty:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __float__(self) -> float:
        raise self.error


class FaultyItem(Faulty):
    def item(self) -> object:
        raise self.error


@pytest.mark.parametrize("error", [KeyError("x"), AttributeError("x"), OverflowError(), RuntimeError(), TypeError()])
def test_what_cannot_say_its_number_is_none(error: Exception) -> None:
    assert as_number(FaultyItem(error)) is None
    if not isinstance(error, OverflowError):
        assert as_number(Faulty(error)) is None
    assert as_finite(Faulty(error)) is None


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (10**400, math.inf),
        (-(10**400), -math.inf),
        (Fraction(-(10**400)), -math.inf),
        (Decimal("-0.5"), -0.5),
        (np.float32(2), 2.0),
        (torch.tensor([3]), 3.0),
        (torch.tensor([3, 4]), None),
        ("1", None),
        (1j, None),
    ],
)
def test_a_number_keeps_its_sign(value: object, number: float | None) -> None:
    assert as_number(value) == number
