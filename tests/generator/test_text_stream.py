"""What may be shown while more is to come. Tokens here are bytes, as in a byte-level tokenizer."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.generator.engine.text_stream import NUM_CONTEXT, TextStream
from ductile.records import Sampling
from tests.nightly import examples


def decode(tokens: list[int], skip_special_tokens: bool) -> str:
    """Byte F8, which no text has, is a special token, spelled <s>."""
    special = b"" if skip_special_tokens else b"<s>"
    return bytes(tokens).replace(b"\xf8", special).decode(errors="replace")


def stream(stop: tuple[str, ...] = (), skip_special_tokens: bool = True) -> TextStream:
    return TextStream(decode, Sampling(stop=stop, skip_special_tokens=skip_special_tokens))


def pieces(text: str, sizes: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    tokens = list(text.encode())
    shown: list[str] = []
    follower = stream(stop)
    while tokens:
        size = sizes.pop(0) if sizes else 1
        part, tokens = tokens[:size], tokens[size:]
        shown.append(follower.push(part, last=not tokens))
    return shown


@settings(deadline=None)
@given(st.text(min_size=1, max_size=20), st.lists(st.integers(1, 5)))
def test_what_is_shown_adds_up_to_the_whole_text(text: str, sizes: list[int]) -> None:
    assert "".join(pieces(text, sizes)) == text


BYTES = st.sampled_from(
    ["€".encode(), "é".encode(), "😀".encode(), b"a", b"\xff", b"\xe2", b"\x82", b"\xf0\x9f", b"\xf8"]
)


@settings(deadline=None, max_examples=examples(500))
@given(st.lists(BYTES, min_size=1, max_size=30).map(b"".join), st.lists(st.integers(1, 5)), st.booleans())
def test_broken_bytes_are_shown_as_the_whole_completion_spells_them(
    content: bytes, sizes: list[int], skip: bool
) -> None:
    follower, tokens, shown = stream(skip_special_tokens=skip), list(content), ""
    while tokens:
        size = sizes.pop(0) if sizes else 1
        part, tokens = tokens[:size], tokens[size:]
        shown += follower.push(part, last=not tokens)
    assert shown == decode(list(content), skip)


@settings(deadline=None)
@given(st.text("ab\u00e9\u4f60\u20ac\U0001f600", max_size=40).filter(bool))
def test_characters_in_bytes_are_shown_also_where_a_half_one_spoils_those_before_it(text: str) -> None:
    """As decoders with byte fallback do it: a run of bytes that is not all UTF-8 is all spelled as broken."""

    def with_byte_fallback(tokens: list[int], skip_special_tokens: bool) -> str:
        runs = re.findall(rb"[\x80-\xff]+|[\x00-\x7f]+", bytes(tokens))
        return "".join(
            "\ufffd" * len(run) if "\ufffd" in run.decode(errors="replace") else run.decode() for run in runs
        )

    follower, tokens = TextStream(with_byte_fallback, Sampling()), list(text.encode())
    shown = [follower.push([token], last=index == len(tokens)) for index, token in enumerate(tokens, 1)]
    assert "".join(shown) == text


@settings(deadline=None)
@given(st.text("abc", min_size=1, max_size=20), st.lists(st.integers(1, 3)), st.lists(st.text("abc", min_size=1)))
def test_text_ends_before_the_first_stop_string(text: str, sizes: list[int], stops: list[str]) -> None:
    """The engine ends a completion at the token that completes a stop string; here that is found by searching."""
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


def test_a_completion_goes_on_from_its_prompt() -> None:
    """Decoders of sentencepiece's kind drop the space that a text begins with, and a completion begins none."""
    pieces = {1: "\u2581the", 2: "\u2581end"}

    def decode(tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(pieces[token] for token in tokens).replace("\u2581", " ").removeprefix(" ")

    assert TextStream(decode, Sampling(), prompt=(1, 1)).push([2, 1], last=True) == " end the"
    assert TextStream(decode, Sampling()).push([2, 1], last=True) == "end the"


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0xF8, *b"ab<s>", *"\u00f1".encode()]), min_size=1, max_size=40),
    st.lists(st.text("ab<s>\u00f1", min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
)
def test_generation_ends_where_the_text_is_cut(tokens: list[int], stops: list[str], skip: bool) -> None:
    """The engine follows token by token, the server what came of a step or all at once; both find the same end."""
    engine, said = stream(tuple(stops), skip_special_tokens=skip), 0
    while said < len(tokens) and not engine.stopped:
        engine.push([tokens[said]], last=False)
        said += 1
    whole = decode(tokens[:said], skip)
    cuts = [whole.index(stop) for stop in stops if stop in whole]
    assert engine.stopped == bool(cuts)
    server = stream(tuple(stops), skip_special_tokens=skip)
    assert server.push(tokens[:said], last=True) == whole[: min(cuts, default=len(whole))]


def test_bytes_that_are_no_character_are_not_held_back_for_ever() -> None:
    follower, lengths = stream(), []

    def counting(tokens: list[int], skip_special_tokens: bool) -> str:
        lengths.append(len(tokens))
        return decode(tokens, skip_special_tokens)

    follower._decode = counting
    shown = "".join(follower.push([0xFF], last=False) for _ in range(200))
    assert len(shown) > 190
    assert max(lengths) < 2 * NUM_CONTEXT
