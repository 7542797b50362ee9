"""Columns are what the tuples of their values are, and come back from the wire bit for bit, or not at all."""

import pickle
import struct
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.columns import Column, Floats, Mask, TokenIds, Versions
from ductile.records import GenerateRequest, Generation, Rollout, Sample, Sampling

KINDS: dict[type[Column], st.SearchStrategy] = {
    TokenIds: st.one_of(st.integers(0, 2**bits - 1) for bits in (1, 8, 16, 24, 31)),
    Versions: st.integers(-1, 2**31 - 1),
    Floats: st.floats(width=32),
    Mask: st.booleans(),
}


@st.composite
def columns(draw: st.DrawFn) -> tuple[type[Column], list]:
    """A kind, and values of it with runs of all lengths."""
    kind = draw(st.sampled_from(sorted(KINDS, key=lambda each: each.__name__)))
    runs = draw(st.lists(st.tuples(KINDS[kind], st.integers(1, 40)), max_size=20))
    return kind, [value for value, length in runs for _ in range(length)]


def bits(column: Column) -> bytes:
    return column.array.tobytes()


@given(columns())
def test_a_column_comes_back_from_the_wire_bit_for_bit(given_column) -> None:
    kind, values = given_column
    column = kind(values)
    sent = column.to_bytes()
    back = kind.from_bytes(sent)
    assert len(back) == len(column) == len(values)
    assert bits(back) == bits(column)
    assert back.array.dtype == kind.dtype
    assert back.to_bytes() == sent
    assert len(sent) <= 1 + len(values) * kind.dtype.itemsize


@given(columns(), st.integers(-50, 50), st.integers(-50, 50))
def test_a_column_is_the_tuple_of_its_values(given_column, start: int, stop: int) -> None:
    kind, values = given_column
    values = [0.0 if value != value else value for value in values]  # a NaN equals nothing
    column, as_tuple = kind(values), tuple(values)
    assert column == as_tuple == tuple(column)
    assert hash(column) == hash(as_tuple)
    assert (len(column), bool(column)) == (len(as_tuple), bool(as_tuple))
    assert column[start:stop] == as_tuple[start:stop]
    assert column[start:stop] + column == as_tuple[start:stop] + as_tuple
    assert column + as_tuple[:3] == as_tuple + as_tuple[:3]
    assert type(column[start:]) is kind
    assert all(type(value) is type(expected) for value, expected in zip(column, as_tuple, strict=True))
    for value in set(as_tuple):
        assert (column.count(value), column.index(value)) == (as_tuple.count(value), as_tuple.index(value))
        assert value in column
    assert column == kind(iter(values)) == deepcopy(column) == pickle.loads(pickle.dumps(column))  # noqa: S301


def test_a_column_tells_what_is_not_in_it() -> None:
    with pytest.raises(ValueError, match="7 is not in the column"):
        TokenIds((1, 2)).index(7)
    with pytest.raises(IndexError):
        TokenIds((1, 2))[2]
    assert TokenIds((1, 2)) != (1, 2, 3)
    assert TokenIds((1, 2)) != "12"
    assert repr(Mask((True, False))) == "Mask(True, False)"
    assert repr(TokenIds(range(1000))) == "TokenIds(0, 1, 2, 3, 4, 5, 6, 7, … 1000 in all)"


def test_nobody_changes_a_column() -> None:
    values = np.array([1, 2, 3], np.int32)
    column = TokenIds(values)
    values[0] = 9
    assert column == (1, 2, 3)
    with pytest.raises(ValueError, match="read-only"):
        column.array[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        Versions.from_bytes(Versions((5,) * 100).to_bytes()).array[0] = 9


@pytest.mark.parametrize(
    ("values", "num_bytes"),
    [
        (TokenIds((255,) * 1000), 1000),
        (TokenIds((256,) * 1000), 2000),
        (TokenIds((151_935,) * 1000), 3000),
        (TokenIds((2**24,) * 1000), 4000),
        (Versions((3,) * 900 + (4,) * 100), 16),
        (Mask((False,) * 10 + (True,) * 990), 10),
        (Mask((False, True) * 500), 1000),
        (Floats(np.linspace(-1, 0, 1000)), 4000),
        (Floats((0.0,) * 10 + (0.5,) * 990), 16),
    ],
    ids=repr,
)
def test_a_column_takes_as_few_bytes_as_its_values_need(values: Column, num_bytes: int) -> None:
    assert len(values.to_bytes()) == num_bytes + 1


def test_runs_are_of_equal_bits() -> None:
    """-0.0 is not 0.0, and one NaN is not another."""
    other_nan = np.frombuffer(struct.pack("<I", 0x7FC00001), "<f4")[0]
    for values in ([0.0] * 50 + [-0.0] * 50, [np.nan] * 50 + [other_nan] * 50):
        column = Floats(np.array(values, np.float32))
        sent = column.to_bytes()
        assert len(sent) == 17
        assert bits(Floats.from_bytes(sent)) == bits(column)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (TokenIds, (2**31,)),
        (TokenIds, "abc"),
        (Versions, (-(2**31) - 1,)),
        (Floats, ("x",)),
        (Mask, ((True,), (False,))),
    ],
)
def test_what_a_column_cannot_hold_is_refused(kind: type[Column], values) -> None:
    with pytest.raises(ValueError, match=f"not {kind.__name__}"):
        kind(values)


def test_a_number_too_large_for_float32_is_infinite() -> None:
    assert Floats((1e39, -1e39)) == (float("inf"), float("-inf"))


def runs(values: bytes, *lengths: int) -> bytes:
    return values + struct.pack(f"<{len(lengths)}I", *lengths) + b"\0"


HOSTILE = [
    (TokenIds, [1, 2], "TokenIds must be the bytes of a column, not"),
    (TokenIds, b"", "TokenIds must be the bytes of a column, not"),
    (TokenIds, None, "TokenIds must be the bytes of a column, not 'None'"),
    (TokenIds, struct.pack("<ii", 5, -1) + b"\4", "TokenIds has the value -1; the smallest is 0"),
    (TokenIds, runs(struct.pack("<i", 5), 1 << 30), "TokenIds cannot be written in form 0"),
    (TokenIds, b"\1\2\3\4\3", "TokenIds in form 3 cannot have 4 bytes"),
    (TokenIds, b"\1\2\3\4\5\x08", "TokenIds cannot be written in form 8"),
    (Versions, struct.pack("<i", -2) + b"\4", "Versions has the value -2; the smallest is -1"),
    (Versions, runs(struct.pack("<i", -2), 3), "Versions has the value -2; the smallest is -1"),
    (Versions, b"\1\2", "Versions cannot be written in form 2"),
    (Floats, b"\1\2\3\4", "Floats in form 4 cannot have 3 bytes"),
    (Floats, runs(b"\0" * 8, 3), "Floats in form 0 cannot have 12 bytes"),
    (Floats, runs(b"\0" * 8, 3, 0), "Floats has a run of no values"),
    (Mask, b"\1\2\1", "Mask has the byte 2; it must be 0 or 1"),
    (Mask, runs(b"\7", 3), "Mask has the byte 7; it must be 0 or 1"),
    (Mask, b"\1\0\1\0\4", "Mask cannot be written in form 4"),
]


@pytest.mark.parametrize(("kind", "data", "sentence"), HOSTILE, ids=[sentence for *_, sentence in HOSTILE])
def test_malformed_bytes_are_refused(kind: type[Column], data: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        kind.from_bytes(data)


@given(st.sampled_from([TokenIds, Versions, Floats, Mask]), st.binary(max_size=60))
def test_noise_is_a_column_or_a_value_error(kind: type[Column], data: bytes) -> None:
    try:
        column = kind.from_bytes(data)
    except ValueError:
        return
    if len(column) < 1 << 20:
        assert kind.from_bytes(column.to_bytes()).array.tobytes() == column.array.tobytes()


def test_a_length_that_is_only_said_takes_no_memory() -> None:
    """144 GiB in 73 bytes: the column knows its length, and the record refuses it before it is laid out."""
    long = Floats.from_bytes(runs(b"\0" * 4 * 9, *[2**32 - 1] * 9))
    assert len(long) == 9 * (2**32 - 1)
    with pytest.raises(ValueError, match=f"sample of 2 tokens has {len(long)} old_logprobs"):
        Sample(TokenIds((1, 2)), Mask((False, True)), old_logprobs=long)


def test_a_record_makes_columns_of_what_it_is_made_with() -> None:
    sample = Sample((5, 6), [False, True], advantages=np.array([0.0, 0.5]))
    assert sample == Sample(TokenIds((5, 6)), Mask((False, True)), advantages=Floats((0.0, 0.5)))
    assert hash(sample) == hash(deepcopy(sample))
    assert (sample.num_trained, sample.prompt) == (1, (5,))
    assert Sample((5, 6), (False, False)).prompt is None


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Sample((1, 2), (True,)), "sample of 2 tokens has 1 loss_mask"),
        (lambda: Sample((1, 2), (False, True), (0.5,)), "sample of 2 tokens has 1 rollout_logprobs"),
        (
            lambda: GenerateRequest("a", (1,), Sampling(), "", (1, 2), (0.5,), (0, 0)),
            "request a: 2 generated tokens, 1 log",
        ),
        (
            lambda: Generation("a", (1, 2), (0.5, 0.5), (0,), "stop"),
            "completion a: 2 tokens, 2 log-probs and 1 versions",
        ),
        (lambda: Rollout((1,), (True, True), (0.5,), (0,), "stop", 1.0), "rollout of 1 tokens has 2 in its mask"),
    ],
)
def test_the_columns_of_a_record_are_equally_long(make, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_log_probs_keep_all_bits_of_an_engine_s() -> None:
    exact = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    assert np.array_equal(Floats(exact.tolist()).array, exact)
    assert Floats(exact.tolist()).array.tobytes() == Floats.from_bytes(Floats(exact).to_bytes()).array.tobytes()
