"""Whole tensors, put together from what each slot has in its memory: the dumb twin of all that gathers.

Nothing travels between slots here. Each hands over its flat buffers, and `model_layout` says which box of which tensor
lies where in them. A layout that says something else than the trainer has done shows as a buffer of another size, as
copies that differ, or as a tensor that is not what it should be.
"""

from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from ductile.core.layout.geometry.layout import Layout, Tensor
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.strategy import model_layout
from ductile.core.layout.model.spec import ModelSpec

Array = NDArray[np.generic]
Buffers = Mapping[str, Array]
"""A slot's flat buffers, by name."""


class WrongParts(AssertionError):
    """What slots have is no state of this layout. The text names a tensor and a slot."""


def state_layout(spec: ModelSpec, parallel: ParallelLayout, kinds: tuple[str, ...]) -> Layout:
    """Where a trainer's tensors lie; `kinds` are the prefixes of their names: "model/", "exp_avg/", "gradient/"."""
    parameters = model_layout(spec, parallel, "float32")
    layouts = [parameters.kind(kind, "float32") for kind in kinds]
    return Layout([tensor for layout in layouts for tensor in layout], parallel.slots)


def assemble(layout: Layout, held: Mapping[int, Buffers]) -> dict[str, Array]:
    """Every tensor of the layout. Raises WrongParts when the slots' buffers are others than the layout's, when an
    element is on no slot, or when two slots that have the same one differ in a bit."""
    for slot in layout.slots:
        _check_buffers(layout, slot, held[slot])
    return {tensor.name: _whole(tensor, held) for tensor in layout}


def differing(ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> list[str]:
    """Names of the tensors of which not every bit is the same, and of those that only one side has."""
    return sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours or name not in theirs or ours[name].tobytes() != theirs[name].tobytes()
    )


def _check_buffers(layout: Layout, slot: int, buffers: Buffers) -> None:
    expected = {name: size for name, (_, size) in layout.buffer_sizes(slot).items() if size}
    found = {name: buffer.size for name, buffer in buffers.items() if buffer.size}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise WrongParts(
                f"slot {slot} has {found.get(name, 0)} elements of {name}, and its layout says {expected.get(name, 0)}"
            )


def _whole(tensor: Tensor, held: Mapping[int, Buffers]) -> Array:
    dtype = np.dtype(tensor.dtype)
    whole, holder = np.zeros(tensor.shape, dtype), np.full(tensor.shape, -1)
    for slot in held:
        for start, stop, offset, strides, buffer in tensor.holdings.rows_of(slot):
            box = tuple(map(slice, start, stop))
            flat = held[slot][tensor.buffer(buffer)][offset:]
            part = np.lib.stride_tricks.as_strided(
                flat, [b - a for a, b in zip(start, stop, strict=True)], [dtype.itemsize * stride for stride in strides]
            )
            there = holder[box] >= 0
            if (whole[box][there].tobytes()) != part[there].tobytes():
                other = int(holder[box][there].max())
                raise WrongParts(f"slots {other} and {slot} have the same part of {tensor.name}, and differ in it")
            whole[box], holder[box] = part, slot
    if (holder < 0).any():
        raise WrongParts(f"{int((holder < 0).sum())} of {prod(tensor.shape)} elements of {tensor.name} are on no slot")
    return whole
