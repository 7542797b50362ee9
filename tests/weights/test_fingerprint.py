import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.weights.fingerprint import fingerprint

BLOCK_BYTES = 1 << 17


def noise(num_bytes: int) -> bytearray:
    return bytearray(np.random.default_rng(0).bytes(num_bytes))


def test_equals_published_values():
    # From xxHash's own documentation of XXH3 with 64 bits and no seed.
    assert fingerprint(b"") == 0x2D06800538D394C2
    assert 0 <= fingerprint(noise(BLOCK_BYTES)) < 2**64


def test_any_kind_of_memory_will_do():
    data = noise(1000)
    views = (bytes(data), memoryview(data), np.frombuffer(data, np.uint8).data)
    assert {fingerprint(view) for view in views} == {fingerprint(data)}


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
    weights = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    for negate in (slice(None), slice(1, None, 2), slice(1, 4, 2)):
        changed = weights.copy()
        changed[negate] *= -1
        assert fingerprint(changed.tobytes()) != fingerprint(weights.tobytes())
