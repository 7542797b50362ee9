import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.weights.fingerprint import fingerprint

BLOCK_BYTES = 16384 * 8


def noise(num_bytes: int, seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(num_bytes))


def dumb_fingerprint(data: bytes) -> int:
    """The same definition, a word at a time in Python's unbounded integers."""
    from ductile.weights.fingerprint import _CHAIN, _FACTORS, _scramble

    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) // 8 * 8, 8)]
    value = 0
    for start in range(0, len(words), 16384):
        block = sum((w ^ (w >> 29)) * int(_FACTORS[i]) for i, w in enumerate(words[start : start + 16384]))
        value = value * _CHAIN + block
    value = value * _CHAIN + int.from_bytes(data[len(words) * 8 :], "little")
    return _scramble((value % 2**64) ^ _scramble(len(data)))


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 13])
def test_equals_the_definition(num_bytes: int):
    data = bytes(noise(num_bytes))
    assert fingerprint(data) == dumb_fingerprint(data)
    assert 0 <= fingerprint(data) < 2**64


@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_changed_bit_shows(data: bytes, draw: st.DataObject):
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    assert fingerprint(bytes(changed)) != fingerprint(data)


@given(st.binary(max_size=100), st.integers(1, 50))
def test_appended_zeros_show(data: bytes, count: int):
    assert fingerprint(data + bytes(count)) != fingerprint(data)


@pytest.mark.parametrize(("first", "second", "length"), [(0, 8, 8), (0, BLOCK_BYTES, 8), (0, BLOCK_BYTES, BLOCK_BYTES)])
def test_swapped_stretches_show(first: int, second: int, length: int):
    data = noise(3 * BLOCK_BYTES)
    swapped = bytearray(data)
    swapped[first : first + length] = data[second : second + length]
    swapped[second : second + length] = data[first : first + length]
    assert fingerprint(swapped) != fingerprint(data)


def test_a_negated_tensor_shows():
    # Sign bits of the odd floats are the top bits of their words: products modulo 2^64 alone would lose pairs of them.
    weights = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    for negate in (slice(None), slice(1, None, 2), slice(1, 4, 2)):
        changed = weights.copy()
        changed[negate] *= -1
        assert fingerprint(changed.tobytes()) != fingerprint(weights.tobytes())
