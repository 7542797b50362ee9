"""Every token is on one slot, slots have equally much to do, and a style is refused for a reason."""

from math import lcm

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.geometry.context_parallel import (
    CpStyle,
    document_multiple,
    num_laid_out,
    style_violation,
    token_multiple,
    tokens_of_slots,
)

STYLES: tuple[CpStyle, ...] = ("ulysses", "ring")
sizes = st.integers(1, 6)


def test_cards_are_dealt_out() -> None:
    assert tokens_of_slots("ulysses", [4, 2], 2).tolist() == [[0, 2, 4], [1, 3, 5]]


def test_a_ring_has_a_chunk_from_the_front_and_one_from_the_back_of_each_document() -> None:
    assert tokens_of_slots("ring", [4, 8], 2).tolist() == [[0, 4, 5, 3, 10, 11], [1, 6, 7, 2, 8, 9]]


@given(st.sampled_from(STYLES), st.lists(sizes, min_size=1, max_size=5), st.integers(2, 5))
def test_every_token_is_on_one_slot(style: CpStyle, chunks: list[int], cp: int) -> None:
    documents = [chunk * 2 * cp for chunk in chunks]
    tokens = tokens_of_slots(style, documents, cp)
    assert tokens.shape == (cp, sum(documents) // cp)
    assert sorted(tokens.flatten().tolist()) == list(range(sum(documents)))


@given(st.lists(sizes, min_size=1, max_size=5), st.integers(2, 5))
def test_slots_of_a_ring_have_equally_many_pairs(chunks: list[int], cp: int) -> None:
    documents = [chunk * 2 * cp for chunk in chunks]
    seen = np.concatenate([np.arange(length) + 1 for length in documents])  # tokens that each token sees
    assert len({seen[own].sum() for own in tokens_of_slots("ring", documents, cp)}) == 1


@given(st.sampled_from(STYLES), st.lists(st.integers(1, 40), max_size=5), sizes, sizes)
def test_as_few_tokens_fill_up_as_can_be(style: CpStyle, documents: list[int], cp: int, tp: int) -> None:
    num_tokens, multiple = num_laid_out(style, documents, cp, tp), token_multiple(style, cp, tp)
    assert multiple == (lcm(2 * cp, cp * tp) if style == "ring" and cp > 1 else cp * tp)
    assert num_tokens % multiple == 0
    assert num_tokens > 0, "a slot without a token of its own would have no part in the layers"
    each = document_multiple(style, cp)
    least = sum(length + (-length) % each for length in documents)
    assert least <= num_tokens < max(1, least) + multiple


@pytest.mark.parametrize(
    ("style", "num_heads", "cp", "tp", "expected"),
    [
        ("ring", 7, 4, 1, None),
        ("ulysses", 8, 4, 2, None),
        ("ulysses", 7, 1, 1, None),
        ("ulysses", 10, 2, 3, None),  # 4, 4 and 2 heads
        (
            "ulysses",
            12,
            8,
            1,
            "the model's 12 query heads out to the slots along cp, and cp is 8: write cp_style = \"ring\", or a cp of "
            "1, 2, 3, 4, 6 or 12",
        ),
        (
            "ulysses",
            12,
            4,
            2,
            "the 6 query heads of a slot of tp 2 out to the slots along cp, and cp is 4: write cp_style = \"ring\", or "
            "a cp of 1, 2, 3 or 6",
        ),
        (
            "ulysses",
            10,
            4,
            3,
            "the 2 query heads of a slot of tp 3 out to the slots along cp, and cp is 4: write cp_style = \"ring\", or "
            "a cp of 1 or 2",
        ),
        ("ulysses", 5, 3, 2, "write cp_style = \"ring\", or a cp of 1"),  # 3 and 2 heads
    ],
)  # fmt: skip
def test_what_a_model_can_have(style: CpStyle, num_heads: int, cp: int, tp: int, expected: str | None) -> None:
    violation = style_violation(style, num_heads, cp, tp)
    assert (violation is None) == (expected is None)
    assert violation is None or violation.sentence.endswith(str(expected))
