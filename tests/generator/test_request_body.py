"""How many lists and objects a body has, before it is parsed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.generator.server import request_body

TEXTS = st.text('[{"\\]}\n a\u00e9', max_size=6)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
)


@pytest.fixture(autouse=True)
def _always_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "MAX_CONTAINERS", -1)


def num_containers(value: Any) -> int:
    """The dumb way."""
    if isinstance(value, dict):
        return 1 + sum(map(num_containers, value.values()))
    return 1 + sum(map(num_containers, value)) if isinstance(value, list) else 0


@given(VALUES, st.booleans())
def test_lists_and_objects_are_counted_and_brackets_in_strings_are_not(value: Any, ascii: bool) -> None:
    assert request_body._num_containers(json.dumps(value, ensure_ascii=ascii).encode()) == num_containers(value)


@pytest.mark.parametrize(
    ("raw", "number"),
    [
        (rb'["\\", [], "\\\"[", {}]', 3),
        (rb'["[\"[', 1),
        (rb'["[\\', 1),
        (rb'["[\\" [', 2),
        (b'[["', 2),
    ],
)
def test_what_is_before_the_end_of_a_broken_body_counts(raw: bytes, number: int) -> None:
    assert request_body._num_containers(raw) == number
