"""States whose every element says where it belongs, for real processes to move.

An element's bits are its number (`tests.core.transfer.twin`) times an odd constant: no two are equal, all bits are in
use, and among the floats are NaNs with payloads, infinities and denormals. Padding has one pattern of its own.
"""

from collections.abc import Mapping

import numpy as np
import torch

from ductile.core.layout.geometry.layout import ITEM_BYTES, Layout
from tests.core.transfer.twin import PAD, Buffers

PADDING = 0x5A
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

State = dict[str, torch.Tensor]


def state(layout: Layout, slot: int, numbers: Buffers) -> State:
    """The slot's buffers with the bits of these numbers."""
    held = numbers.get(slot, {})
    found: State = {}
    for name, (dtype, size) in layout.buffer_sizes(slot).items():
        values = held[name]
        bits = (values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - 8 * ITEM_BYTES[dtype])
        bits = bits.astype(_UNSIGNED[ITEM_BYTES[dtype]])
        raw = bits.view(np.uint8).reshape(size, ITEM_BYTES[dtype])
        if dtype == "bool":
            raw &= 1
        raw[values == PAD] = PADDING & (1 if dtype == "bool" else 0xFF)
        found[name] = torch.from_numpy(raw.reshape(-1)).view(getattr(torch, dtype))
    return found


def padding(layout: Layout, slot: int) -> State:
    """Buffers as they are before anything arrives."""
    return {name: allocate(name, dtype, size) for name, (dtype, size) in layout.buffer_sizes(slot).items()}


def allocate(name: str, dtype: str, size: int) -> torch.Tensor:
    fill = PADDING & (1 if dtype == "bool" else 0xFF)
    return torch.full((size * ITEM_BYTES[dtype],), fill, dtype=torch.uint8).view(getattr(torch, dtype))


def differences(found: Mapping[str, torch.Tensor], expected: State) -> list[str]:
    """Buffers that are not the same bytes."""
    said = [f"{name}: missing" for name in expected.keys() - found.keys()]
    said += [f"{name}: nobody asked for it" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        ours, theirs = (buffers[name].reshape(-1).view(torch.uint8) for buffers in (found, expected))
        if ours.shape != theirs.shape or not torch.equal(ours, theirs):
            wrong = int((ours != theirs).sum()) if ours.shape == theirs.shape else len(ours)
            said.append(f"{name}: {wrong} of {len(theirs)} bytes differ")
    return said
