"""A 64-bit fingerprint of a stretch of memory: did these bytes arrive whole, unchanged and in their places?

1. The bytes are read as 64-bit words in blocks of 128 KiB, which stay in the cache between the passes.
2. Each word's upper bits are mixed into its lower bits, so that a flipped sign moves more than the top bit, of which
   any product modulo 2^64 loses pairs. The shift is 29, not 32: negating both floats of a word would cancel out.
3. A block's value is the sum of its words times fixed odd random factors, one a position: swapped words show.
4. Blocks are chained as a polynomial, so swapped blocks show; the length goes in last, so added zeros show.

All arithmetic is modulo 2^64. It guards against accidents, not against somebody who wants two inputs to collide.
"""

import numpy as np
import numpy.typing as npt

_BLOCK_WORDS = 16384
_MODULUS = 1 << 64
_MIX = 29
_CHAIN = 0x9E3779B97F4A7C15
_FACTORS = np.random.Generator(np.random.PCG64(0x0D0C711E)).integers(0, _MODULUS, _BLOCK_WORDS, np.uint64) | np.uint64(
    1
)


def fingerprint(data: bytes | bytearray | memoryview | npt.NDArray[np.uint8]) -> int:
    """The fingerprint of `data` (contiguous bytes), an int of 64 bits."""
    content = np.frombuffer(data, np.uint8)
    num_whole = len(content) // 8 * 8
    words = content[:num_whole].view(np.uint64)
    scratch = np.empty(_BLOCK_WORDS, np.uint64)
    value = 0
    for start in range(0, len(words), _BLOCK_WORDS):
        value = (value * _CHAIN + _block(words[start : start + _BLOCK_WORDS], scratch)) % _MODULUS
    tail = int.from_bytes(content[num_whole:].tobytes(), "little")
    value = (value * _CHAIN + tail) % _MODULUS
    return _scramble(value ^ _scramble(len(content)))


def _block(words: npt.NDArray[np.uint64], scratch: npt.NDArray[np.uint64]) -> int:
    mixed = scratch[: len(words)]
    np.right_shift(words, _MIX, out=mixed)
    np.bitwise_xor(mixed, words, out=mixed)
    np.multiply(mixed, _FACTORS[: len(words)], out=mixed)
    return int(mixed.sum())


def _scramble(value: int) -> int:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % _MODULUS
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % _MODULUS
    return value ^ (value >> 31)
