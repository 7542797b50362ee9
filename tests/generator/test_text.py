"""What may be shown while more is to come. Tokens here are bytes, as in a byte-level tokenizer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.generator.text import TextStream


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def pieces(text: str, sizes: list[int], stop: tuple[str, ...] = (), stop_ids: tuple[int, ...] = ()) -> list[str]:
    tokens = list(text.encode())
    stream = TextStream(decode, stop, stop_ids)
    shown: list[str] = []
    while tokens:
        size = sizes.pop(0) if sizes else 1
        part, tokens = tokens[:size], tokens[size:]
        shown.append(stream.push(part, last=not tokens))
    return shown


@settings(deadline=None)
@given(st.text(min_size=1, max_size=20), st.lists(st.integers(1, 5)))
def test_what_is_shown_adds_up_to_the_whole_text(text: str, sizes: list[int]) -> None:
    assert "".join(pieces(text, sizes)) == text


@settings(deadline=None)
@given(st.text("abc", min_size=1, max_size=20), st.lists(st.integers(1, 3)), st.lists(st.text("abc", min_size=1)))
def test_text_ends_before_the_first_stop_string(text: str, sizes: list[int], stops: list[str]) -> None:
    """The engine ends an answer at the token that completes a stop string; here that is found by searching."""
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    said = text[: min(ends)] if ends else text
    expected = said[: min((said.index(stop) for stop in stops if stop in said), default=len(said))]
    assert "".join(pieces(said, sizes, tuple(stops))) == expected


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("añb", (), ["a", "", "ñ", "b"]),
        ("a<b", ("<end>",), ["a", "", "<b"]),
        ("a<end>", ("<end>",), ["a", "", "", "", "", ""]),
        ("a<en", ("<end>",), ["a", "", "", "<en"]),
    ],
)
def test_what_may_still_change_is_held_back(text: str, stop: tuple[str, ...], expected: list[str]) -> None:
    assert pieces(text, [], stop) == expected


def test_the_token_that_ended_the_answer_is_not_shown() -> None:
    assert pieces("ab!", [3], stop_ids=(ord("!"),)) == ["ab"]
    assert pieces("a!b", [3], stop_ids=(ord("!"),)) == ["a!b"]
