"""Numbers of a model folder's weights, read without torch: enough of them to compare two tensors, or to know how large
weights are. Whoever needs it imports it late, for it loads numpy."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ductile.config.checks.weight_headers import ITEM_BYTES, ModelFolderError, StoredTensor, Weights

_NUM_EACH = 1 << 22
_NUM_SAMPLED = 1 << 14


def num_differing(weights: Weights, name: str, other: str) -> int:
    """Numbers of the tensor `other` that are not those of `name`, in the precision of `other`. Their shapes are equal.
    Raises ModelFolderError."""
    dtype = weights.entries[other].dtype
    pairs = zip(*(_numbers(weights.file_of[each], weights.entries[each]) for each in (name, other)), strict=True)
    return sum(int(np.count_nonzero(_rounded(ours, dtype) != theirs)) for ours, theirs in pairs)


def sampled(weights: Weights) -> NDArray[np.float32]:
    """Some thousand numbers, of each tensor its share, from its middle. Raises ModelFolderError."""
    entries = {name: entry for name, entry in weights.entries.items() if entry.dtype in ITEM_BYTES}
    total = sum(entry.size for entry in entries.values())
    taken: list[NDArray[np.float32]] = []
    for name, entry in entries.items():
        num = -(-entry.size * _NUM_SAMPLED // max(total, _NUM_SAMPLED))
        begin = entry.begin + (entry.size - num) // 2 * ITEM_BYTES[entry.dtype]
        taken += _numbers(weights.file_of[name], replace(entry, shape=(num,), begin=begin))
    return np.concatenate(taken)


def drawn(deviation: float) -> NDArray[np.float32]:
    """Numbers of random weights, as many as `sampled` takes."""
    return np.random.default_rng(0).normal(0.0, deviation, _NUM_SAMPLED).astype(np.float32)


def share_standing_still(weights: NDArray[np.float32], step: float, bits: int) -> float:
    """Share of the weights that an update of size `step` leaves as they are: it is less than half of the distance to
    the next number that has so many significant bits."""
    _, exponents = np.frexp(weights)  # |weight| is 0.5 to 1 times 2 to this power
    stands_still = (weights != 0) & (np.ldexp(1.0, exponents - 1 - bits) > step)
    return np.count_nonzero(stands_still) / weights.size


def _numbers(file: Path, entry: StoredTensor) -> Iterator[NDArray[np.float32]]:
    """A tensor's numbers, some at a time, as many whatever the dtype."""
    try:
        with file.open("rb") as stream:
            stream.seek(entry.begin)
            for first in range(0, entry.size, _NUM_EACH):
                read = stream.read(min(_NUM_EACH, entry.size - first) * ITEM_BYTES[entry.dtype])
                if entry.dtype == "BF16":  # the upper half of a float32
                    yield (np.frombuffer(read, "<u2").astype(np.uint32) << 16).view(np.float32)
                else:
                    yield np.frombuffer(read, "<f4" if entry.dtype == "F32" else "<f2").astype(np.float32)
    except OSError as error:
        raise ModelFolderError(f"{file} cannot be read: {error.strerror}") from error


def _rounded(numbers: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """The numbers as a tensor of that dtype holds them."""
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).astype(np.float32)
    if dtype == "BF16":
        bits = numbers.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return numbers
