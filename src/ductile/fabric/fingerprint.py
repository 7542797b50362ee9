"""A 64-bit fingerprint of a whole state that does not depend on its layout: the same before and after any reshard.

    sum over tensors    name factor
      * sum over elements    bits as an integer * product over dims of that dim's weight at the element's index

Everything is modulo 2^64, and the factors and weights are odd random numbers, so a changed element, swapped rows, a row
that came twice or a tensor in another's place show. Each slot adds up the elements that it is the first to hold; the
sum over all slots is the state's. It guards against accidents, not against an attacker who wants two states to collide.

An item of eight bytes counts as two of four: no difference of two items is then a multiple of 2^32, and an odd weight
cannot make it vanish.
"""

from functools import lru_cache
from hashlib import blake2b
from zlib import crc32

import torch

from ductile.core.transfer.cells import atoms
from ductile.fabric.memory import Memory

MODULUS = 1 << 64
BLOCK_ITEMS = 1 << 17
"""Items that are contracted at once: as 64-bit integers they stay in a core's second cache."""
GPU_BLOCK_ITEMS = 1 << 24
_GOLDEN, _FIRST, _SECOND = (value - MODULUS for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def fingerprint(memory: Memory) -> int:
    """This slot's part. The parts of all slots, added modulo 2^64, are the fingerprint of the state."""
    total = 0
    for tensor in memory.layout:
        owned = atoms(tensor.holdings)
        for index, slots in enumerate(owned.slots):
            if slots[(crc32(tensor.name.encode()) + index) % len(slots)] == memory.slot:
                start, stop = tuple(owned.start[index].tolist()), tuple(owned.stop[index].tolist())
                total += _name_factor(tensor.name) * _box(memory.box(tensor.name, (start, stop)), start)
    return total % MODULUS


def box_fingerprint(box: torch.Tensor) -> bytes:
    """The fingerprint of one box alone, on any device: what xxh3 is to a CPU's memory."""
    return (_box(box, (0,) * box.dim()) % MODULUS).to_bytes(8, "little")


def _box(box: torch.Tensor, start: tuple[int, ...]) -> int:
    """The sum over a block that begins at index `start` of its tensor."""
    if box.element_size() == 8:
        return _box(box.contiguous().view(torch.int32).view(*box.shape, 2), (*start, 0))
    most = BLOCK_ITEMS if box.device.type == "cpu" else GPU_BLOCK_ITEMS
    if box.numel() <= most:
        return _block(box, start)
    num_rows = most // box[0].numel()
    if num_rows:
        pieces = enumerate(box.split(num_rows))
        return sum(_block(piece, (start[0] + index * num_rows, *start[1:])) for index, piece in pieces)
    weights = _weights(box.dim(), start[0], start[0] + len(box), box.device).tolist()
    return sum(weight * _box(row, start[1:]) for weight, row in zip(weights, box, strict=True))


def _block(block: torch.Tensor, start: tuple[int, ...]) -> int:
    """One dim after the other is multiplied by its weights and summed up, the last one first."""
    value = block.to(torch.int64)
    for level, (first, length) in enumerate(zip(reversed(start), reversed(block.shape), strict=True), 1):
        weights = _weights(level, first, first + length, block.device)
        if block.device.type == "cpu":
            value = torch.mv(value.reshape(-1, length), weights).view(value.shape[:-1])
        else:
            value = (value * weights).sum(-1)  # there is no matrix product of integers
    return int(value)


@lru_cache(maxsize=64)
def _weights(level: int, first: int, stop: int, device: torch.device) -> torch.Tensor:
    """Weights of the indices first:stop of a dim, [stop - first]; dims are counted from the last one, which is 1."""
    value = (torch.arange(first, stop, device=device) + (level << 40)) * _GOLDEN
    for shift, factor in ((30, _FIRST), (27, _SECOND)):  # the finaliser of splitmix64
        value = (value ^ _shifted(value, shift)) * factor
    return (value ^ _shifted(value, 31)) | 1


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value >> bits) & ((1 << 64 - bits) - 1)  # torch shifts the sign in


def _name_factor(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") | 1
