"""A 52-bit fingerprint of a box of a tensor, taken where it lies, on any device: what xxh3 is to a CPU's memory.

    sum over elements    bits as an integer * product over dims of that dim's weight at the element's index

Everything is modulo 2^52, which is what a processor multiplies and adds up in one instruction, and the weights are odd
random numbers, so a changed element, swapped rows or a row that came twice show. It guards against accidents, not
against an attacker who wants two boxes to collide.

An item of eight bytes counts as two of four, and the upper half of an item of four `UPPER_HALF` times: the difference
of two items is then no multiple of more than 2^15, and few weights can make it vanish.
"""

from functools import lru_cache

import torch

from ductile.fabric import boxes

MODULUS = 1 << 52
UPPER_HALF = 0xD1B54A32D192ED03 - (1 << 64)
BLOCK_ITEMS = 1 << 17
"""Items that are contracted at once: as 64-bit integers they stay in a core's second cache."""
GPU_BLOCK_ITEMS = 1 << 24
KEPT_ITEMS = 1 << 17
"""Most weights that are kept for the next box: 1 MiB, of which there are 64 at most. No dim of a matrix has many more;
those of a block's own size would take 128 MiB on a GPU, for each length that there is."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""The dtype as which an item's bits are read, by its bytes."""
_GOLDEN, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def box_fingerprint(box: torch.Tensor) -> bytes:
    return (weighted_sum(box, (0,) * box.dim()) % MODULUS).to_bytes(8, "little")


def weighted_sum(box: torch.Tensor, start: tuple[int, ...]) -> int:
    """Return the sum over a box, of at least one dim, that begins at index `start` of its tensor; modulo `MODULUS` it
    is the same, however it was taken."""
    if box.element_size() == 8:
        return weighted_sum(box.contiguous().view(torch.int32).view(*box.shape, 2), (*start, 0))
    if box.is_cpu:
        summed = boxes.weighted_sum(box.data_ptr(), box.shape, box.stride(), box.element_size(), start)
        if summed is not None:
            return summed
    return plain_weighted_sum(box.detach().view(_INTEGERS[box.element_size()]), start)


def copy_and_sum(target: torch.Tensor, box: torch.Tensor, start: tuple[int, ...], past_cache: bool = False) -> int:
    """Copy a box to one of the same dtype, and return the `weighted_sum` of what was written, on a CPU in one pass.

    past_cache: nobody reads the target soon."""
    if box.is_cpu and target.is_cpu and target.shape == box.shape and target.dtype == box.dtype:
        ends = target.data_ptr(), target.stride(), box.data_ptr(), box.stride()
        (summed,) = boxes.copy_and_sum([boxes.BoxCopy(*ends, box.shape, box.element_size(), start)], past_cache)
        if summed is not None:
            return summed
    return weighted_sum(target.detach().copy_(box), start)


def plain_weighted_sum(box: torch.Tensor, start: tuple[int, ...]) -> int:
    """`weighted_sum` by torch alone, of integers of less than 8 bytes: its reference, and on a GPU the way."""
    if not box.numel():
        return 0
    most = BLOCK_ITEMS if box.device.type == "cpu" else GPU_BLOCK_ITEMS
    if box.numel() <= most:
        return _block(box, start)
    num_rows = most // box[0].numel()
    if num_rows:
        pieces = enumerate(box.split(num_rows))
        return sum(_block(piece, (start[0] + index * num_rows, *start[1:])) for index, piece in pieces)
    weights = _weights(box.dim(), start[0], start[0] + len(box), box.device).tolist()
    return sum(weight * plain_weighted_sum(row, start[1:]) for weight, row in zip(weights, box, strict=True))


def _block(block: torch.Tensor, start: tuple[int, ...]) -> int:
    """One dim after the other is multiplied by its weights and summed up, the last one first."""
    value = _unsigned(block)
    for level, (first, length) in enumerate(zip(reversed(start), reversed(block.shape), strict=True), 1):
        weights = _weights(level, first, first + length, block.device)
        if block.device.type == "cpu":
            value = torch.mv(value.reshape(-1, length), weights).view(value.shape[:-1])
        else:
            value = (value * weights).sum(-1)  # there is no matrix product of integers
    return int(value)


def _unsigned(block: torch.Tensor) -> torch.Tensor:
    """Return what each item's bits count as (int64)."""
    value = block.to(torch.int64)
    if block.dtype == torch.int32:
        return (value & 0xFFFF) + (value >> 16 & 0xFFFF) * UPPER_HALF
    return value & 0xFFFF


def _weights(level: int, first: int, stop: int, device: torch.device) -> torch.Tensor:
    """Weights of the indices first:stop of a dim, [stop - first]; dims are counted from the last one, which is 1."""
    return (_kept if stop - first <= KEPT_ITEMS else _computed)(level, first, stop, device)


def _computed(level: int, first: int, stop: int, device: torch.device) -> torch.Tensor:
    value = (torch.arange(first, stop, device=device) + (level << 40)) * _GOLDEN
    for shift, factor in ((30, _FIRST), (27, _SECOND)):  # the finaliser of splitmix64
        value = (value ^ _shifted(value, shift)) * factor
    return (value ^ _shifted(value, 31)) | 1


_kept = lru_cache(maxsize=64)(_computed)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value >> bits) & ((1 << 64 - bits) - 1)  # torch shifts the sign in
